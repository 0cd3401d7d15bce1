//! Tensors of the interpreter: what walks along offsets, against the definition by indices.

use shardc_ir::tensor::{Shape, Tensor, each_index, each_offset, strides};

const SHAPES: &[&[usize]] =
    &[&[], &[1], &[5], &[0], &[2, 3], &[3, 0, 2], &[2, 3, 4], &[2, 1, 3, 2]];

/// Every element is its number.
fn counted(shape: &[usize]) -> Tensor {
    Tensor::new(shape, (0..shape.iter().product::<usize>()).map(|x| x as f64).collect())
}

#[test]
fn each_index_counts_up() {
    for shape in SHAPES {
        let mut seen: Vec<Shape> = vec![];
        each_index(shape, |i| seen.push(i.into()));
        assert_eq!(seen.len(), shape.iter().product::<usize>(), "{shape:?}");
        assert!(seen.is_sorted_by(|a, b| a < b), "{shape:?}: {seen:?}");
        assert!(seen.iter().flat_map(|i| i.iter().zip(*shape)).all(|(i, n)| i < n), "{shape:?}");
    }
}

#[test]
fn offsets_are_those_of_the_indices() {
    for shape in SHAPES {
        let own = strides(shape);
        // In the other tensor neighbours are as far apart as nowhere in this one.
        let other: Shape = (0..shape.len()).map(|d| [7, 0, 100, 3][d]).collect();
        let far = |i: &[usize], by: &[usize]| i.iter().zip(by).map(|(i, s)| i * s).sum::<usize>();
        let (mut want, mut got) = (vec![], vec![]);
        each_index(shape, |i| want.push([far(i, &own), far(i, &other)]));
        each_offset(shape, [&own, &other], |at| got.push(at));
        assert_eq!(got, want, "{shape:?}");
    }
}

#[test]
fn rows_slices_and_joined_pieces_have_their_elements() {
    for shape in SHAPES.iter().filter(|s| !s.is_empty()) {
        let t = counted(shape);
        each_index(&shape[..shape.len() - 1], |i| {
            let row: Vec<f64> = (0..shape[i.len()]).map(|d| t.at(&[i, &[d]].concat())).collect();
            assert_eq!(t.row(i), row, "{shape:?} {i:?}");
            let mut other = t.clone();
            other.row_mut(i).iter_mut().for_each(|x| *x += 1.0);
            assert_eq!(other.row(i), row.iter().map(|x| x + 1.0).collect::<Vec<_>>());
        });
        for dim in 0..shape.len() {
            for cut in 0..=shape[dim] {
                let pieces = [t.slice(dim, 0, cut), t.slice(dim, cut, shape[dim] - cut)];
                each_index(&pieces[1].shape, |i| {
                    let mut whole: Shape = i.into();
                    whole[dim] += cut;
                    assert_eq!(pieces[1].at(i), t.at(&whole), "{shape:?} from {cut} of {dim}");
                });
                assert_eq!(Tensor::concat(dim, &[&pieces[0], &pieces[1]]), t, "{shape:?} {dim}");
            }
        }
    }
}

#[test]
fn a_spread_tensor_has_its_element_at_every_index() {
    // Other order, and dims that the tensor lacks.
    for (shape, at) in [(&[4, 2, 3][..], &[1, 2, 0][..]), (&[5, 4, 2, 1, 3], &[2, 4, 1])] {
        let t = counted(&[2, 3, 4]);
        let want = Tensor::from_fn(shape, |i| t.at(&at.iter().map(|&p| i[p]).collect::<Shape>()));
        assert_eq!(t.spread(shape, at), want, "{shape:?}");
    }
    assert_eq!(Tensor::scalar(3.0).spread(&[2, 2], &[]), Tensor::full(&[2, 2], 3.0));
}
