//! The pipeline: what is decided, and in which order it takes effect.

use perfmon_abi::consts::{
    PFM_FL_NOTIFY_BLOCK, PFM_FL_OVFL_NO_MSG, PFM_MSG_END, PFM_MSG_OVFL, PFM_MSG_PREEMPTED,
    PFM_MSG_RESTORED, PFM_MSG_THROTTLED, PFM_PROV_NONE, PFM_PROV_NOT_COUNTED,
    PFM_REG_RETFL_PROV_SHIFT,
};
use perfmon_abi::{Message, PmdArg};

use super::{
    Exits, NOTIFY, Queue, RESET, STOP, Scripted, bits, context, counter, lines, mask, moment,
    overflow, overflow_with, period, pmc, pmd, restart, wrap,
};
use crate::Quantities;
use crate::context::{Context, Phase};
use crate::format::Control;
use crate::throttle::Throttle;
use pmu_model::{Nanos, VirtualPmd};

/// What a message of overflows in set 0 looks like.
fn told(pmds: &[u16]) -> Vec<Option<Message>> {
    vec![Some(Message {
        kind: PFM_MSG_OVFL,
        active_set: 0,
        generation: 3,
        ovfl_pmds: bits(pmds).words(),
    })]
}

#[test]
fn without_a_format_notification_masks_and_others_just_wrap() {
    // PMDs that overflow, context's flags; message, phase, blocked.
    let table = [
        (vec![0], 0, vec![], Phase::Loaded, false),
        (vec![1], 0, told(&[1]), Phase::Masked, false),
        (vec![0, 1], 0, told(&[0, 1]), Phase::Masked, false),
        (
            vec![1],
            PFM_FL_NOTIFY_BLOCK,
            told(&[1]),
            Phase::Masked,
            true,
        ),
        (vec![0], PFM_FL_NOTIFY_BLOCK, vec![], Phase::Loaded, false),
        (
            vec![1],
            PFM_FL_OVFL_NO_MSG,
            vec![None],
            Phase::Masked,
            false,
        ),
    ];
    for (pmds, flags, messages, phase, blocked) in table {
        let mut context = context(flags);
        counter(&mut context, 0, 0, 0);
        counter(&mut context, 0, 1, NOTIFY);
        assert_eq!(
            overflow(&mut context, &pmds),
            messages,
            "{pmds:?} {flags:#x}"
        );
        assert_eq!((context.phase(), context.is_blocked()), (phase, blocked));
        let values = [0, 1].map(|num| pmd(&mut context, 0, num).value);
        assert_eq!(values, [5, 5], "no value is touched");
    }
}

/// Where the vCPU was can be read until PFM_RESTART, and is unknown otherwise.
#[test]
fn without_a_format_the_place_of_an_overflow_is_known_until_the_restart() {
    let mut context = context(PFM_FL_NOTIFY_BLOCK);
    counter(&mut context, 0, 0, NOTIFY);
    let of_overflow = [
        VirtualPmd::Ring,
        VirtualPmd::Cr3,
        VirtualPmd::Ip,
        VirtualPmd::Tsc,
    ];
    let read = |context: &mut Context| {
        let mut args = of_overflow.map(|which| PmdArg {
            num: which.pmd(),
            ..PmdArg::default()
        });
        context.read_pmds(&mut args, &Exits(1)).unwrap();
        args.map(|arg| (arg.value, arg.flags >> PFM_REG_RETFL_PROV_SHIFT))
    };
    let unknown = [(u64::MAX, PFM_PROV_NOT_COUNTED); 4];
    assert_eq!(read(&mut context), unknown);
    assert_eq!(overflow(&mut context, &[0]), told(&[0]));
    let known = [3, 0x7000, 0x1000, 1].map(|value| (value, PFM_PROV_NONE));
    assert_eq!(read(&mut context), known);
    restart(&mut context).unwrap();
    assert_eq!(read(&mut context), unknown);
}

/// A VM's own clock is told at any time, since nobody else can; the rest of an overflow is not.
#[test]
fn a_clock_of_the_vms_own_is_told_at_any_time() {
    struct Virtual(u64);
    impl Quantities for Virtual {
        fn read(&self, which: VirtualPmd) -> Option<u64> {
            (which == VirtualPmd::Tsc).then_some(self.0)
        }
    }
    let mut context = context(PFM_FL_NOTIFY_BLOCK);
    counter(&mut context, 0, 0, NOTIFY);
    let read = |context: &mut Context, now| {
        let mut args = [VirtualPmd::Tsc, VirtualPmd::Ip].map(|which| PmdArg {
            num: which.pmd(),
            ..PmdArg::default()
        });
        context.read_pmds(&mut args, &Virtual(now)).unwrap();
        args.map(|arg| arg.value)
    };
    assert_eq!(read(&mut context, 500), [500, u64::MAX]);
    assert_eq!(overflow(&mut context, &[0]), told(&[0]));
    assert_eq!(read(&mut context, 600), [1, 0x1000], "of the overflow");
    restart(&mut context).unwrap();
    assert_eq!(read(&mut context, 700), [700, u64::MAX]);
    context.keep_quantities(&Virtual(800));
    context.detached();
    assert_eq!(read(&mut context, 900), [800, u64::MAX], "as it was then");
}

#[test]
fn the_handler_is_asked_for_each_pmd_in_ascending_order_with_one_time_stamp() {
    let mut context = context(0);
    for num in [0, 1, 2] {
        counter(&mut context, 0, num, 0);
    }
    let exits = VirtualPmd::Exits.pmd();
    let steal = VirtualPmd::StealTime.pmd();
    let ring = VirtualPmd::Ring.pmd();
    let cr3 = VirtualPmd::Cr3.pmd();
    pmc(&mut context, 0, 0).smpl_pmds = bits(&[2, exits, steal, ring, cr3]);
    pmd(&mut context, 0, 2).value = 0xabc;
    let log = Scripted::default().install(&mut context);
    for num in [1, 0] {
        wrap(&mut context, num);
    }
    context.overflow(&moment(9), &Exits(0x77), &mut Queue::default());
    let expected = [
        "PMD0 set 0 tsc 9 [abc, 77, ffffffffffffffff, 3, 7000]",
        "PMD1 set 0 tsc 9 []",
    ];
    assert_eq!(lines(&log), expected);
}

#[test]
fn controls_of_several_pmds_are_combined() {
    let notify = Control {
        notify_user: true,
        ..Control::default()
    };
    let block = Control {
        block_thread: true,
        ..RESET
    };
    let both = Control {
        notify_user: true,
        ..RESET
    };
    // Controls of PMD 0, which does not ask for notification, and of PMD 1,
    // which does; message?, phase, blocked, periods left behind.
    let (kept, short) = (5u64.wrapping_neg(), 100);
    let table = [
        (RESET, RESET, false, Phase::Loaded, false, [short, short]),
        (
            RESET,
            Control::default(),
            false,
            Phase::Loaded,
            false,
            [short, kept],
        ),
        (notify, RESET, false, Phase::Loaded, false, [kept, short]),
        (RESET, notify, true, Phase::Loaded, false, [short, kept]),
        (RESET, both, true, Phase::Loaded, false, [short, short]),
        (block, RESET, false, Phase::Loaded, true, [short, short]),
        (RESET, STOP, true, Phase::Masked, true, [kept, kept]),
        // A buffer that is full tells whoever asked (§3.6.5).
        (STOP, RESET, true, Phase::Masked, true, [kept, kept]),
    ];
    for (first, second, message, phase, blocked, periods) in table {
        let mut context = context(PFM_FL_NOTIFY_BLOCK);
        counter(&mut context, 0, 0, 0);
        counter(&mut context, 0, 1, NOTIFY);
        let controls = vec![(0, first), (1, second)];
        let format = Scripted {
            controls,
            ..Scripted::default()
        };
        format.install(&mut context);
        let messages = overflow(&mut context, &[0, 1]);
        let expected = if message { told(&[0, 1]) } else { vec![] };
        assert_eq!(messages, expected, "{first:?} {second:?}");
        assert_eq!((context.phase(), context.is_blocked()), (phase, blocked));
        let left = [0, 1].map(|num| period(&mut context, 0, num));
        assert_eq!(left, periods, "{first:?} {second:?}");
    }
}

#[test]
fn the_first_error_of_a_handler_ends_the_calls() {
    let mut context = context(0);
    for num in [0, 1, 2] {
        counter(&mut context, 0, num, NOTIFY);
    }
    let format = Scripted {
        controls: vec![(0, RESET), (1, RESET), (2, STOP)],
        fails_at: Some(1),
        ..Scripted::default()
    };
    let log = format.install(&mut context);
    assert_eq!(overflow(&mut context, &[0, 1, 2]), vec![]);
    assert_eq!(lines(&log).len(), 2);
    assert_eq!(context.phase(), Phase::Loaded);
    assert_eq!(
        context.sets.set_mut(0).overflowed(),
        bits(&[2]),
        "kept for a restart"
    );
}

#[test]
fn a_full_queue_masks_and_suppresses_the_reset() {
    let both = Control {
        notify_user: true,
        ..RESET
    };
    // The depth is the format's, 8 without one; NO_MSG needs no room.
    for (with_format, unread, flags, dropped) in [
        (false, 7, 0, 0),
        (false, 8, 0, 1),
        (true, 1, 0, 0),
        (true, 2, 0, 1),
        (true, 2, PFM_FL_OVFL_NO_MSG, 0),
    ] {
        let mut context = context(flags);
        counter(&mut context, 0, 1, NOTIFY);
        if with_format {
            let format = Scripted {
                controls: vec![(1, both)],
                on_restart: RESET,
                ..Scripted::default()
            };
            format.install(&mut context);
        }
        let mut queue = Queue {
            unread,
            ..Queue::default()
        };
        overflow_with(&mut context, &[1], 1, &mut queue);
        assert_eq!(context.account().dropped, dropped);
        assert_eq!(queue.messages.len(), usize::from(dropped == 0));
        let masked = dropped == 1 || !with_format;
        let phase = if masked { Phase::Masked } else { Phase::Loaded };
        assert_eq!(context.phase(), phase, "{with_format} {unread}");
        let left = if masked { 5u64.wrapping_neg() } else { 100 };
        assert_eq!(period(&mut context, 0, 1), left);
        if masked {
            assert_eq!(restart(&mut context), Ok(()));
            assert_eq!(period(&mut context, 0, 1), 1000);
        }
    }
}

#[test]
fn overflows_that_nobody_can_use_are_counted_as_spurious() {
    for phase in [Phase::Masked, Phase::Unloaded] {
        let mut context = context(0);
        counter(&mut context, 0, 1, NOTIFY);
        match phase {
            Phase::Unloaded => context.detached(),
            _ => mask(&mut context),
        }
        assert_eq!(overflow(&mut context, &[1]), vec![]);
        assert_eq!(context.account().spurious, 1);
        assert_eq!(context.phase(), phase);
    }
    let mut idle = context(0);
    assert_eq!(overflow(&mut idle, &[]), vec![]);
    assert_eq!((idle.account().spurious, idle.account().overflows), (0, 0));
}

#[test]
fn too_many_interrupts_mask_until_a_restart() {
    let mut context = context(0);
    counter(&mut context, 0, 0, 0);
    context.set_throttle(Throttle::per_second(2, 1000));
    let mut queue = Queue::default();
    for tsc in 0..2 {
        overflow_with(&mut context, &[0], tsc, &mut queue);
    }
    assert_eq!((context.phase(), queue.messages.len()), (Phase::Loaded, 0));
    overflow_with(&mut context, &[0], 2, &mut queue);
    assert_eq!(context.phase(), Phase::Masked);
    let kinds: Vec<_> = queue.messages.iter().flatten().map(|m| m.kind).collect();
    assert_eq!(kinds, [PFM_MSG_THROTTLED]);
    assert_eq!(context.account().throttled, 1);
    assert_eq!(restart(&mut context), Ok(()));
    assert_eq!(context.phase(), Phase::Loaded);
}

#[test]
fn other_messages_carry_the_generation_and_the_blind_spot() {
    let mut context = context(PFM_FL_OVFL_NO_MSG);
    let mut queue = Queue::default();
    context.preempted(&mut queue);
    queue.unread = 8;
    context.restored(Nanos(40), &mut queue);
    queue.unread = 0;
    context.preempted(&mut queue);
    context.restored(Nanos(2), &mut queue);
    context.preempted(&mut queue);
    context.restored(Nanos(7), &mut queue);
    queue.unread = 100;
    context.ended(&mut queue);
    let told: Vec<_> = queue.messages.iter().flatten().collect();
    assert!(told.iter().all(|message| message.generation == 3));
    let told: Vec<_> = told.iter().map(|m| (m.kind, m.ovfl_pmds)).collect();
    let expected = [
        (PFM_MSG_PREEMPTED, [0, 0]),
        (PFM_MSG_PREEMPTED, [0, 0]),
        (PFM_MSG_RESTORED, [42, 2]),
        (PFM_MSG_PREEMPTED, [0, 0]),
        (PFM_MSG_RESTORED, [7, 3]),
        (PFM_MSG_END, [0, 0]),
    ];
    assert_eq!(told, expected);
    assert_eq!(context.account().dropped, 1);
}
