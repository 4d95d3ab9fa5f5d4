//! Loads that found no room, and owners who are asked.

use arbiter::{Cookie, CounterSet};
use perfmon_abi::wire::Refusal;
use pmu_virt::perfmon::{AttachedContext, GuestLimit, NotLoaded};

use super::*;
use crate::job::{Ask, GivenUp};

const LIMIT: GuestLimit = GuestLimit { fewer: 1, most: 1 };

fn given() -> GivenUp {
    GivenUp {
        counters: CounterSet::first(1, 0),
        cookie: Cookie::from_random(7),
    }
}

/// Plays a vCPU that has no room for a context. The context.
fn no_room(queue: &JobQueue) -> ContextId {
    let mut of = None;
    job(queue).act(|id, work| {
        of = Some(id);
        let Work::Load(hosted, _) = work else {
            panic!("{work:?}")
        };
        Done::Loaded(Err(NotLoaded {
            hosted,
            refusal: Refusal::new(Errno::EBUSY, "no room"),
            beside: Some(LIMIT),
        }))
    });
    of.unwrap()
}

/// The vCPU has the context from now on.
fn has_room(queue: &JobQueue) -> Option<Box<AttachedContext>> {
    let mut loaded = None;
    job(queue).act(|_, work| {
        let Work::Load(hosted, _) = work else {
            panic!("{work:?}")
        };
        loaded = Some(hosted);
        Done::Loaded(Ok(()))
    });
    loaded
}

fn question(queue: &JobQueue) -> (Job, Ask) {
    let job = job(queue);
    match job.work {
        Some(Work::Ask(ask)) => (job, ask),
        ref other => panic!("{other:?}"),
    }
}

fn answer(queue: &JobQueue, answer: Result<Option<GivenUp>, &str>) {
    let (job, ask) = question(queue);
    assert!(matches!(ask, Ask::KeepTo { limit: LIMIT, .. }), "{ask:?}");
    job.act(|_, _| Done::Asked(answer.map_err(str::to_owned)));
}

/// The vCPU is to ask no more, which it answers with `late`.
fn asked_no_more(queue: &JobQueue, asked: Job, late: Result<Option<GivenUp>, &str>) {
    let (no_more, ask) = question(queue);
    assert!(matches!(ask, Ask::NoMore), "{ask:?}");
    asked.act(|_, _| Done::Asked(late.map_err(str::to_owned)));
    no_more.act(|_, _| Done::Settled);
}

fn gets_back(queue: &JobQueue) {
    let (job, ask) = question(queue);
    let Ask::GiveBack(back) = ask else {
        panic!("{ask:?}")
    };
    assert_eq!(back.counters, given().counters);
    job.act(|_, _| Done::Settled);
}

fn is_idle(stage: &Stage) {
    stage.client.hello().unwrap();
    for queue in &stage.queues.vcpus {
        assert!(queue.take().is_none());
    }
}

/// Plays both vCPUs in `play` while a client does `call` on a context.
fn during(stage: &Stage, mut call: Call, play: impl FnOnce()) -> Result<(), Refusal> {
    let context = stage.client.create(0, None, &[]).unwrap();
    std::thread::scope(|scope| {
        let (client, context) = (&stage.client, &context);
        let done = scope.spawn(move || client.call(context, &mut call));
        play();
        done.join().unwrap()
    })
}

fn load() -> Call {
    Call::Load(LoadArg { pid: 1, set: 0 })
}

#[test]
fn owners_who_give_up_make_room() {
    let stage = Stage::new();
    let [other, its] = &stage.queues.vcpus[..] else {
        panic!()
    };
    let context = stage.client.create(0, None, &[]).unwrap();
    let (client, context) = (&stage.client, &context);
    let loaded = std::thread::scope(|scope| {
        let done = scope.spawn(move || client.call(context, &mut load()));
        no_room(its);
        let (job, ask) = question(its);
        assert!(matches!(ask, Ask::KeepTo { is_there: true, .. }), "{ask:?}");
        let (at_other, ask) = question(other);
        let elsewhere = matches!(
            ask,
            Ask::KeepTo {
                is_there: false,
                ..
            }
        );
        assert!(elsewhere, "{ask:?}");
        // Other clients are served meanwhile.
        let second = Client::connect(stage._folder.path().join("control")).unwrap();
        second.hello().unwrap();
        job.act(|_, _| Done::Asked(Ok(Some(given()))));
        at_other.act(|_, _| Done::Asked(Ok(None)));
        let loaded = has_room(its);
        done.join().unwrap().unwrap();
        loaded
    });
    is_idle(&stage);
    std::thread::scope(|scope| {
        let done = scope.spawn(move || client.call(context, &mut Call::Unload));
        job(its).act(|_, _| Done::Unloaded(loaded));
        done.join().unwrap().unwrap();
        gets_back(its);
    });
    is_idle(&stage);
}

/// All of the largest VM are asked at once, and one that keeps its counters is enough: the
/// others have theirs back.
#[test]
fn sixty_four_owners_are_asked() {
    let stage = Stage::of(64);
    let (last, others) = stage.queues.vcpus.split_last().unwrap();
    let refused = during(&stage, load(), || {
        no_room(&stage.queues.vcpus[1]);
        let asked: Vec<Job> = others.iter().map(|queue| question(queue).0).collect();
        for job in asked {
            job.act(|_, _| Done::Asked(Ok(Some(given()))));
        }
        answer(last, Err("vCPU 63: the kernel holds PMC5"));
        others.iter().for_each(gets_back);
    });
    let reason = "no room; the owners were asked: vCPU 63: the kernel holds PMC5";
    let refusal = refused.unwrap_err();
    assert_eq!((refusal.errno, &*refusal.reason), (Errno::EBUSY, reason));
    is_idle(&stage);
}

#[test]
fn an_owner_who_keeps_its_counters_is_named() {
    let stage = Stage::new();
    let [other, its] = &stage.queues.vcpus[..] else {
        panic!()
    };
    let refused = during(&stage, load(), || {
        no_room(its);
        let (at_other, _) = question(other);
        answer(its, Err("vCPU 1: the kernel holds PMC5"));
        // What it has given up meanwhile it gets back.
        asked_no_more(other, at_other, Ok(Some(given())));
        gets_back(other);
    });
    let refusal = refused.unwrap_err();
    let reason = "no room; the owners were asked: vCPU 1: the kernel holds PMC5";
    assert_eq!((refusal.errno, &*refusal.reason), (Errno::EBUSY, reason));
    is_idle(&stage);
}

#[test]
fn an_owner_who_takes_it_again_ends_it() {
    let stage = Stage::new();
    let [other, its] = &stage.queues.vcpus[..] else {
        panic!()
    };
    let refused = during(&stage, load(), || {
        for _ in 0..4 {
            no_room(its);
            answer(its, Ok(Some(given())));
            answer(other, Ok(None));
        }
        no_room(its);
        for _ in 0..4 {
            gets_back(its);
        }
    });
    assert_eq!(refused.unwrap_err().errno, Errno::EBUSY);
    is_idle(&stage);
}

#[test]
fn a_load_that_must_not_wait_comes_again() {
    let stage = Stage::new();
    let [other, its] = &stage.queues.vcpus[..] else {
        panic!()
    };
    let context = stage.client.create(0, None, &[]).unwrap();
    let (client, context) = (&stage.client, &context);
    let try_load = move || client.call(context, &mut Call::TryLoad(LoadArg { pid: 1, set: 0 }));
    let errno = |done: Result<(), Refusal>| done.map_err(|refusal| refusal.errno);
    for kept in [true, false] {
        std::thread::scope(|scope| {
            let done = scope.spawn(try_load);
            no_room(its);
            assert_eq!(errno(done.join().unwrap()), Err(Errno::EAGAIN));
        });
        assert_eq!(errno(try_load()), Err(Errno::EAGAIN));
        let blocking = client.call(context, &mut load());
        assert_eq!(errno(blocking), Err(Errno::EBUSY), "one load waits");
        answer(other, Ok(None));
        answer(its, if kept { Err("kept") } else { Ok(Some(given())) });
        if kept {
            let refusal = loop {
                match try_load().unwrap_err() {
                    refusal if refusal.errno == Errno::EAGAIN => {}
                    refusal => break refusal,
                }
            };
            assert!(refusal.reason.ends_with(": kept"), "{refusal}");
        }
    }
    std::thread::scope(|scope| {
        let done = scope.spawn(move || {
            loop {
                match try_load() {
                    Err(refusal) if refusal.errno == Errno::EAGAIN => {}
                    done => break done,
                }
            }
        });
        has_room(its);
        done.join().unwrap().unwrap();
    });
}

#[test]
fn what_was_given_up_for_nothing_goes_back() {
    let stage = Stage::new();
    let [other, its] = &stage.queues.vcpus[..] else {
        panic!()
    };
    let context = stage.client.create(0, None, &[]).unwrap();
    let (client, context) = (&stage.client, &context);
    let errno = |done: Result<(), Refusal>| done.map_err(|refusal| refusal.errno);
    let tried = |pid| {
        let mut call = Call::TryLoad(LoadArg { pid, set: 0 });
        client.call(context, &mut call)
    };
    let try_load = |kept: bool| {
        std::thread::scope(|scope| {
            let done = scope.spawn(|| tried(1));
            no_room(its);
            assert_eq!(errno(done.join().unwrap()), Err(Errno::EAGAIN));
        });
        answer(other, Ok(None));
        answer(its, if kept { Err("kept") } else { Ok(Some(given())) });
        client.hello().unwrap();
    };
    // The tool thinks better of it.
    try_load(false);
    client.call(context, &mut Call::Unload).unwrap();
    gets_back(its);
    assert_eq!(
        errno(client.call(context, &mut Call::Unload)),
        Err(Errno::EBUSY)
    );
    // What another load would find is none of its business, and it goes by what is there.
    try_load(true);
    std::thread::scope(|scope| {
        let done = scope.spawn(|| tried(0));
        has_room(other);
        done.join().unwrap().unwrap();
    });
    is_idle(&stage);
}

#[test]
fn a_load_that_waits_can_be_canceled() {
    let stage = Stage::new();
    let [other, its] = &stage.queues.vcpus[..] else {
        panic!()
    };
    let context = stage.client.create(0, None, &[]).unwrap();
    let (client, context) = (&stage.client, &context);
    // By whoever else has the context.
    let second = Client::connect(stage._folder.path().join("control")).unwrap();
    let handle = second.adopt(context.as_fd().try_clone_to_owned().unwrap());
    let handle = handle.unwrap();
    std::thread::scope(|scope| {
        let done = scope.spawn(move || client.call(context, &mut load()));
        no_room(its);
        let (at_other, _) = question(other);
        let (asked, _) = question(its);
        second.call(&handle, &mut Call::Unload).unwrap();
        asked_no_more(other, at_other, Err("withdrawn"));
        asked_no_more(its, asked, Ok(Some(given())));
        gets_back(its);
        let refusal = done.join().unwrap().unwrap_err();
        assert_eq!(refusal.errno, Errno::ECANCELED);
    });
    let errno = second.call(&handle, &mut Call::Unload).unwrap_err().errno;
    assert_eq!(errno, Errno::EBUSY, "nothing waits");
    is_idle(&stage);

    // By the end of its connection. The next load asks then.
    let mut wire = Wire::new(&stage);
    let create = Call::Create(CtxArg::default(), Vec::new());
    wire.send(NO_CONTEXT, &create, &[]);
    let (_, number) = wire.answer();
    wire.send(number, &load(), &[]);
    let first = no_room(its);
    let (at_other, _) = question(other);
    let (asked, _) = question(its);
    std::thread::scope(|scope| {
        let done = scope.spawn(move || client.call(context, &mut load()));
        assert_ne!(no_room(its), first);
        drop(wire);
        asked_no_more(other, at_other, Err("withdrawn"));
        asked_no_more(its, asked, Err("withdrawn"));
        no_room(its);
        answer(its, Err("kept"));
        answer(other, Ok(None));
        done.join().unwrap().unwrap_err();
    });
}
