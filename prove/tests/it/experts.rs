//! Laid-out forms of small programs: which of them are seen to be the same.

use shardc_ir::text::parse;
use shardc_prove::{Report, Verdict, experts};

/// From `%x` of 2 rows of 4 tokens to one number, by these lines and with these factors of tokens.
fn verdict(lines: [&str; 2]) -> Verdict {
    let text = |lines: &str| {
        format!(
            "func @model(%x: f32[2,4,4,3] input \"x\", %w: f32[5,3] param \"w\") -> (f32[] sum \"loss\") {{
{lines}
  %loss = reduce_sum[bs->] %back : f32[]
  return %loss
}}
"
        )
    };
    let [model, laid] = lines.map(|l| parse(&text(l)).unwrap_or_else(|e| panic!("{e}\n{l}")));
    let mut report = Report::default();
    experts::prove(&model, &laid, &mut report);
    report.verdict()
}

const ONE: &str = "  %t = reshape[(zb)shk->z(bs)hk; z=1] %x : f32[1,8,4,3]
  %m = reduce_max[zthk->ztk] %t : f32[1,8,3]
  %s = reduce_sum[ztk->zt] %m : f32[1,8]
  %back = reshape[z(bs)->(zb)s; z=1,b=2] %s : f32[2,4]";

#[test]
fn what_is_behind_tokens_stays() {
    let two = "  %t = reshape[(zb)shk->z(bs)hk; z=2] %x : f32[2,4,4,3]
  %m = reduce_max[zthk->ztk] %t : f32[2,4,3]
  %s = reduce_sum[ztk->zt] %m : f32[2,4]
  %back = reshape[z(bs)->(zb)s; z=2,b=1] %s : f32[2,4]";
    assert_eq!(verdict([ONE, two]), Verdict::Proved);
    // As many elements, and a maximum of others.
    let regrouped = "  %t = reshape[(zb)s(uv)k->z(bs)u(vk); z=2,u=2] %x : f32[2,4,2,6]
  %m = reduce_max[zthk->ztk] %t : f32[2,4,6]
  %s = reduce_sum[ztk->zt] %m : f32[2,4]
  %back = reshape[z(bs)->(zb)s; z=2,b=1] %s : f32[2,4]";
    assert_ne!(verdict([ONE, regrouped]), Verdict::Proved);
}

#[test]
fn a_transpose_of_the_model_may_stand_behind_an_end() {
    let of = |z: usize| {
        let (t, b) = (8 / z, 2 / z);
        format!(
            "  %t = reshape[(zb)shk->z(bs)hk; z={z}] %x : f32[{z},{t},4,3]
  %wt = transpose[ek->ke] %w : f32[3,5]
  %d = dot[zthk,ke->zte] %t, %wt : f32[{z},{t},5]
  %s = reduce_sum[zte->zt] %d : f32[{z},{t}]
  %back = reshape[z(bs)->(zb)s; z={z},b={b}] %s : f32[2,4]"
        )
    };
    assert_eq!(verdict([&of(1), &of(2)]), Verdict::Proved);
}
