package linear

import (
	"bytes"
	"context"
	"math"
	"sort"
	"strings"
	"time"

	"keelson.dev/keelson/raftstore"
)

// CheckOptions are the parameters of Recorder.Check.
type CheckOptions struct {
	// Skew is the largest error of a replica's clock.
	Skew time.Duration
	// Timeout is the timeout of the search for a sequential order of the calls (default one
	// minute).
	Timeout time.Duration
	// Dir is the directory for HTML pages that visualize calls without a valid order, one page per
	// key. "" means that no pages are written.
	Dir string
}

// Check verifies the recording against the contract of raftstore.Store and returns the violations.
// It must be called after all clients and followers have ended.
func (r *Recorder) Check(o CheckOptions) *Report {
	r.mu.Lock()
	defer r.mu.Unlock()
	rep := new(Report)
	for _, op := range r.ops {
		rep.countCall(op)
	}
	h := r.composeHistory(rep)
	for _, s := range r.sessions {
		h.checkSession(rep, s)
	}
	a := &audit{rec: r, rep: rep, h: h, skew: o.Skew, applied: make(map[*op][]raftstore.Revision),
		maker: make(map[raftstore.Revision]*op)}
	a.indexCommits()
	a.attributeRevisions()
	for _, op := range r.ops {
		a.checkCall(op)
	}
	a.realTime()
	a.checkLocalReads()
	a.checkFenceOrder()
	r.searchOrder(rep, a, o)
	return rep
}

func (r *Report) countCall(o *op) {
	r.Ops++
	switch o.fate {
	case done:
		r.Acknowledged++
	case refused:
		r.Refused++
	case failed:
		r.Failed++
		if r.Failures == nil {
			r.Failures = make(map[string]int)
		}
		what := context.DeadlineExceeded // a cancellation of a read is treated like a timeout
		if sure := sureError(o.err); sure != nil {
			what = sure
		}
		r.Failures[what.Error()]++
	default:
		r.Unknown++
	}
	if o.fate == done && o.kind == opCommit && o.commit.Fence != 0 {
		r.Fenced++
	}
	if o.fate == unknown && (o.kind != opCommit || !isUnknown(o.err)) {
		r.addViolation(Untyped, "%s: %v", o.formatCall(), o.err)
	}
}

// audit is the state of one call of Check: the recorded calls, the history, and which call has made
// which revision.
type audit struct {
	rec     *Recorder
	rep     *Report
	h       *history
	skew    time.Duration
	writer  map[string]*op               // commits by the keys and values that they put (key=value)
	applied map[*op][]raftstore.Revision // revisions that each commit has made, according to the history
	maker   map[raftstore.Revision]*op   // commit that has made each revision; nil for an expiry
}

// indexCommits sets writer: the commits by the keys and values that they put.
func (a *audit) indexCommits() {
	a.writer = make(map[string]*op)
	for _, o := range a.rec.ops {
		for _, step := range o.commit.Ops {
			if step.Kind == raftstore.OpPut {
				a.writer[step.Key+"="+string(step.Value)] = o
			}
		}
	}
}

// attributeRevisions determines which commit has made each revision of the history. It identifies
// the commit by the values in the revision, and checks that the revision has the effect of that
// commit. A revision without a commit must be an expiry.
func (a *audit) attributeRevisions() {
	for _, rev := range a.h.revisions {
		seen := a.h.events[rev]
		var by *op
		for i := range seen.Events.Events {
			if ev := &seen.Events.Events[i]; ev.Kind == raftstore.EventPut {
				by = a.writer[ev.Item.Key+"="+string(ev.Item.Value)]
				break
			}
		}
		if by == nil {
			a.checkExpiry(seen)
			continue
		}
		a.maker[rev] = by
		a.applied[by] = append(a.applied[by], rev)
		a.checkEffect(by, seen)
	}
}

// slack is the tolerance for comparing times, because the store rounds them to milliseconds.
const slack = 2 * time.Millisecond

// checkExpiry checks a revision that was not made by a commit. It must delete only keys with a TTL,
// and no key before it expires. seen is the first delivery of the revision to a watcher.
func (a *audit) checkExpiry(seen sighting) {
	for i := range seen.Events.Events {
		ev := &seen.Events.Events[i]
		if ev.Kind == raftstore.EventPut || ev.Prev == nil || ev.Prev.Expires == 0 {
			a.rep.addViolation(Foreign, "revision %d: %s", seen.Revision, formatEvents(seen.Events))
			return
		}
		a.rep.Expired++
		due := time.UnixMilli(ev.Prev.Expires).Add(-a.skew)
		if at := a.rec.began.Add(seen.at); at.Before(due.Add(-slack)) {
			a.rep.addViolation(Expiry, "revision %d: %s expired %s before its time", seen.Revision,
				ev.Item.Key, due.Sub(at))
		}
	}
}

// checkEffect checks that the revision that the commit o has made has the effect of o. The
// preconditions must hold in the state before the revision, and the events must match the ops. seen
// is the first delivery of the revision to a watcher.
func (a *audit) checkEffect(o *op, seen sighting) {
	var want []raftstore.OpKind
	var keys []string
	for i := range o.commit.Ops {
		step := &o.commit.Ops[i]
		was := a.h.itemAt(step.Key, seen.Revision-1)
		if !preconditionHolds(step.If, was) {
			a.rep.addViolation(Broken, "revision %d: %s, but %s was %s", seen.Revision, o.formatCall(), step.Key,
				formatItem(was))
		}
		if step.Kind == raftstore.OpCheck || step.Kind == raftstore.OpDelete && was == nil ||
			!strings.HasPrefix(step.Key, a.rec.prefix) {
			continue
		}
		want, keys = append(want, step.Kind), append(keys, step.Key)
	}
	events := seen.Events.Events
	if len(want) != len(events) {
		a.rep.addViolation(Torn, "revision %d: %s, but its events are %s", seen.Revision, o.formatCall(),
			formatEvents(seen.Events))
		return
	}
	for i := range events {
		if events[i].Item.Key != keys[i] || (events[i].Kind == raftstore.EventPut) != (want[i] == raftstore.OpPut) {
			a.rep.addViolation(Torn, "revision %d: %s, but its events are %s", seen.Revision, o.formatCall(),
				formatEvents(seen.Events))
			return
		}
	}
	for i := range o.commit.Ops {
		a.checkPut(o, &o.commit.Ops[i], seen.Revision)
	}
}

func (a *audit) checkPut(o *op, step *raftstore.Op, rev raftstore.Revision) {
	if step.Kind != raftstore.OpPut || !strings.HasPrefix(step.Key, a.rec.prefix) {
		return
	}
	is := a.h.itemAt(step.Key, rev)
	if is == nil || !bytes.Equal(is.Value, step.Value) {
		a.rep.addViolation(Torn, "revision %d: %s, but %s is %s", rev, o.formatCall(), step.Key, formatItem(is))
		return
	}
	if step.TTL == 0 {
		if is.Expires != 0 {
			a.rep.addViolation(Expiry, "revision %d: %s was put without TTL and has one", rev, step.Key)
		}
		return
	}
	from, to := a.rec.began.Add(o.call+step.TTL-a.skew), a.rec.began.Add(o.ret+step.TTL+a.skew)
	if at := time.UnixMilli(is.Expires); at.Before(from.Add(-slack)) || o.fate == done && at.After(to.Add(slack)) {
		a.rep.addViolation(Expiry, "revision %d: %s was put with TTL %s at about %s and shall expire at %s", rev,
			step.Key, step.TTL,
			a.rec.began.Add(o.call).UTC().Format("15:04:05.000"), at.UTC().Format("15:04:05.000"))
	}
}

func preconditionHolds(p raftstore.Precondition, is *raftstore.Item) bool {
	switch {
	case p.Absent:
		return is == nil
	case p.Revision != 0:
		return is != nil && is.Modified == p.Revision
	}
	return true
}

// checkCall compares the result of the call o with the state of the history at the revision that
// the call returned.
func (a *audit) checkCall(o *op) {
	switch o.kind {
	case opCommit:
		a.checkCommit(o)
	case opGet:
		if o.fate == done && !sameItem(o.item, a.h.itemAt(o.key, o.rev)) {
			a.rep.addViolation(a.violationKind(o), "%s, but at that revision it is %s", o.formatCall(),
				formatItem(a.h.itemAt(o.key, o.rev)))
		}
	case opList:
		if o.fate == done {
			a.checkList(o)
		}
	}
}

func (a *audit) violationKind(o *op) Kind {
	if o.kind == opList {
		return TornList
	}
	return WrongRead
}

func (a *audit) checkCommit(o *op) {
	where := a.applied[o]
	if len(where) > 1 {
		a.rep.addViolation(Doubled, "%s, and is in the history at %v", o.formatCall(), where)
	}
	switch {
	case o.fate == done && len(where) == 0:
		a.checkIdle(o)
	case o.fate == done && where[0] != o.rev:
		a.rep.addViolation(LostWrite, "%s, but it is in the history at %v", o.formatCall(), where)
	case (o.fate == failed || o.fate == refused) && len(where) > 0:
		a.rep.addViolation(Resurrected, "%s, but it is in the history at %v", o.formatCall(), where)
	case o.fate == refused:
		a.checkConflict(o)
	}
}

// checkIdle checks a commit that was acknowledged, but is not in the history. Such a commit must
// have changed nothing, and its preconditions must hold.
func (a *audit) checkIdle(o *op) {
	for i := range o.commit.Ops {
		step := &o.commit.Ops[i]
		was := a.h.itemAt(step.Key, o.rev)
		if step.Kind == raftstore.OpPut || step.Kind == raftstore.OpDelete && was != nil {
			if _, told := a.h.events[o.rev]; !told && o.rev < a.h.latestRevision(math.MaxUint64) {
				a.rep.addViolation(WatchGap, "nobody was told of revision %d: %s", o.rev, o.formatCall())
			} else {
				a.rep.addViolation(LostWrite, "%s, but it is not in the history", o.formatCall())
			}
			return
		}
		if !preconditionHolds(step.If, was) {
			a.rep.addViolation(Broken, "%s, but %s was %s", o.formatCall(), step.Key, formatItem(was))
		}
	}
}

func (a *audit) checkConflict(o *op) {
	c := o.conflict
	is := a.h.itemAt(c.Key, c.At)
	if c.NoValue && is != nil {
		bare := *is
		bare.Value = nil
		is = &bare
	}
	if !sameItem(c.Have, is) || preconditionHolds(c.Want, is) {
		a.rep.addViolation(Broken, "%s, but at that revision %s is %s", o.formatCall(), c.Key, formatItem(is))
	}
}

func (a *audit) checkList(o *op) {
	if o.read.At != 0 && o.rev != o.read.At {
		a.rep.addViolation(WrongRead, "%s, but revision %d was asked for", o.formatCall(), o.read.At)
	}
	want := a.h.listAt(o.key, o.read.After, o.rev)
	more, rest := false, 0
	if o.read.Limit > 0 && len(want) > o.read.Limit {
		more, rest = true, len(want)-o.read.Limit
		want = want[:o.read.Limit]
	}
	if more != o.list.More || int64(rest) != o.list.Remaining {
		a.rep.addViolation(TornList, "%s says more=%v, %d remaining; want %v, %d", o.formatCall(), o.list.More,
			o.list.Remaining, more, rest)
	}
	for i := range max(len(want), len(o.list.Items)) {
		var w, g *raftstore.Item
		if i < len(want) {
			w = &want[i]
		}
		if i < len(o.list.Items) {
			g = &o.list.Items[i]
		}
		if !sameItem(w, g) {
			a.rep.addViolation(TornList, "%s: item %d is %s, want %s", o.formatCall(), i, formatName(g), formatName(w))
			return
		}
	}
}

func formatName(it *raftstore.Item) string {
	if it == nil {
		return "nothing"
	}
	return it.Key + " " + formatItem(it)
}

// moment is the time at which a call started or ended, since the start of the recording.
type moment struct {
	at  time.Duration
	end bool
	op  *op
}

// sortedMoments returns the starts of all given calls, and the ends of the calls that were
// acknowledged or refused, sorted by time. Starts precede ends with the same time.
func sortedMoments(ops []*op) []moment {
	out := make([]moment, 0, 2*len(ops))
	for _, o := range ops {
		out = append(out, moment{o.call, false, o})
		if o.fate == done || o.fate == refused {
			out = append(out, moment{o.ret, true, o})
		}
	}
	sort.SliceStable(out, func(i, j int) bool {
		if out[i].at != out[j].at {
			return out[i].at < out[j].at
		}
		return !out[i].end && out[j].end
	})
	return out
}

// effectRevision returns the revision that a commit has made, or else the revision that the call
// has observed. moved reports whether the call has changed the store. The revision is 0 if no
// revision is known that the call has made or observed.
func (a *audit) effectRevision(o *op) (at raftstore.Revision, moved bool) {
	switch {
	case o.kind == opCommit && len(a.applied[o]) > 0:
		return a.applied[o][0], true
	case o.fate == refused:
		return o.conflict.At, false
	case o.fate == done:
		return o.rev, false
	}
	return 0, false
}

// realTime checks that the order of revisions matches the order of calls in real time. A call that
// started after another call had returned must observe the same revision as that call or a later
// one. If it changed the store, its revision must be later.
func (a *audit) realTime() {
	var floor raftstore.Revision
	var by *op
	for _, m := range sortedMoments(a.rec.ops) {
		at, moved := a.effectRevision(m.op)
		past := m.op.read.Local || m.op.read.At != 0
		switch {
		case at == 0:
		case m.end:
			if at > floor && !past {
				floor, by = at, m.op
			}
		case past || floor == 0:
		case moved && at <= floor:
			a.rep.addViolation(WentBack, "%s took effect at revision %d, but began after the end of: %s",
				m.op.formatCall(), at, by.formatCall())
		case at < floor:
			a.rep.addViolation(StaleRead, "%s, but began after the end of: %s", m.op.formatCall(), by.formatCall())
		}
	}
}

// checkLocalReads checks that a local read through a replica does not observe an older revision
// than earlier calls through the same replica. Only a read or commit that ended before the local
// read counts as earlier.
func (a *audit) checkLocalReads() {
	type mark struct {
		at raftstore.Revision
		by *op
	}
	floors := make(map[string]mark)
	for _, m := range sortedMoments(a.rec.ops) {
		at, moved := a.effectRevision(m.op)
		if at == 0 || m.op.read.At != 0 {
			continue
		}
		f := floors[m.op.door]
		if m.end {
			// A commit waits until its own replica has applied it, but only until the deadline.
			if at > f.at && (!moved || m.op.inTime) && m.op.fate != refused {
				floors[m.op.door] = mark{at, m.op}
			}
		} else if m.op.read.Local && at < f.at {
			a.rep.addViolation(WentBack, "%s at %s, which before had: %s", m.op.formatCall(), m.op.door,
				f.by.formatCall())
		}
	}
}

// checkFenceOrder checks that no commit with a fence follows a commit with a newer fence in the
// history.
func (a *audit) checkFenceOrder() {
	var newest *op
	for _, rev := range a.h.revisions {
		o := a.maker[rev]
		if o == nil || o.commit.Fence == 0 {
			continue
		}
		if newest != nil && o.commit.Fence < newest.commit.Fence {
			a.rep.addViolation(Unfenced, "revision %d: %s follows %s", rev, o.formatCall(), newest.formatCall())
			continue
		}
		newest = o
	}
}
