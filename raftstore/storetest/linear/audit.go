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

// CheckOptions say what the store was put through.
type CheckOptions struct {
	// Skew is by how much the clocks of the store may have been wrong.
	Skew time.Duration
	// Timeout bounds the search for an order (default one minute).
	Timeout time.Duration
	// Dir is where calls that fit in no order are drawn, one page per key; "" = nowhere.
	Dir string
}

// Check holds everything that was recorded against the contract. Call it when
// all clients and followers have ended.
func (r *Recorder) Check(o CheckOptions) *Report {
	r.mu.Lock()
	defer r.mu.Unlock()
	rep := new(Report)
	for _, op := range r.ops {
		rep.count(op)
	}
	h := r.compose(rep)
	for _, s := range r.sessions {
		h.checkSession(rep, s)
	}
	a := &audit{rec: r, rep: rep, h: h, skew: o.Skew, applied: make(map[*op][]raftstore.Revision), maker: make(map[raftstore.Revision]*op)}
	a.index()
	a.attribute()
	for _, op := range r.ops {
		a.check(op)
	}
	a.realTime()
	a.doors()
	a.fences()
	r.searchOrder(rep, a, o)
	return rep
}

func (r *Report) count(o *op) {
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
		what := context.DeadlineExceeded // or cancelled: of a read, which is the same
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
		r.add(Untyped, "%s: %v", o.describe(), o.err)
	}
}

// audit holds calls against the history.
type audit struct {
	rec     *Recorder
	rep     *Report
	h       *history
	skew    time.Duration
	writer  map[string]*op               // by value put
	applied map[*op][]raftstore.Revision // where a commit is in the history
	maker   map[raftstore.Revision]*op   // who made a revision; nil for expiry
	floor   map[*op]raftstore.Revision   // the newest revision known to somebody before the call
}

// index finds commits by what they put.
func (a *audit) index() {
	a.writer = make(map[string]*op)
	for _, o := range a.rec.ops {
		for _, step := range o.commit.Ops {
			if step.Kind == raftstore.OpPut {
				a.writer[step.Key+"="+string(step.Value)] = o
			}
		}
	}
}

// attribute finds who made each revision.
func (a *audit) attribute() {
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

// slack is what the rounding of times to milliseconds may cost.
const slack = 2 * time.Millisecond

// checkExpiry looks at a revision without puts: it must be an expiry.
func (a *audit) checkExpiry(seen sighting) {
	for i := range seen.Events.Events {
		ev := &seen.Events.Events[i]
		if ev.Kind == raftstore.EventPut || ev.Prev == nil || ev.Prev.Expires == 0 {
			a.rep.add(Foreign, "revision %d: %s", seen.Revision, tell(seen.Events))
			return
		}
		a.rep.Expired++
		due := time.UnixMilli(ev.Prev.Expires).Add(-a.skew)
		if at := a.rec.began.Add(seen.at); at.Before(due.Add(-slack)) {
			a.rep.add(Expiry, "revision %d: %s expired %s before its time", seen.Revision, ev.Item.Key, due.Sub(at))
		}
	}
}

// checkEffect compares a revision with what the ops of its commit do.
func (a *audit) checkEffect(o *op, seen sighting) {
	var want []raftstore.OpKind
	var keys []string
	for i := range o.commit.Ops {
		step := &o.commit.Ops[i]
		was := a.h.at(step.Key, seen.Revision-1)
		if !holds(step.If, was) {
			a.rep.add(Broken, "revision %d: %s, but %s was %s", seen.Revision, o.describe(), step.Key, show(was))
		}
		if step.Kind == raftstore.OpCheck || step.Kind == raftstore.OpDelete && was == nil || !strings.HasPrefix(step.Key, a.rec.prefix) {
			continue
		}
		want, keys = append(want, step.Kind), append(keys, step.Key)
	}
	events := seen.Events.Events
	if len(want) != len(events) {
		a.rep.add(Torn, "revision %d: %s, but its events are %s", seen.Revision, o.describe(), tell(seen.Events))
		return
	}
	for i := range events {
		if events[i].Item.Key != keys[i] || (events[i].Kind == raftstore.EventPut) != (want[i] == raftstore.OpPut) {
			a.rep.add(Torn, "revision %d: %s, but its events are %s", seen.Revision, o.describe(), tell(seen.Events))
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
	is := a.h.at(step.Key, rev)
	if is == nil || !bytes.Equal(is.Value, step.Value) {
		a.rep.add(Torn, "revision %d: %s, but %s is %s", rev, o.describe(), step.Key, show(is))
		return
	}
	if step.TTL == 0 {
		if is.Expires != 0 {
			a.rep.add(Expiry, "revision %d: %s was put without TTL and has one", rev, step.Key)
		}
		return
	}
	from, to := a.rec.began.Add(o.call+step.TTL-a.skew), a.rec.began.Add(o.ret+step.TTL+a.skew)
	if at := time.UnixMilli(is.Expires); at.Before(from.Add(-slack)) || o.fate == done && at.After(to.Add(slack)) {
		a.rep.add(Expiry, "revision %d: %s was put with TTL %s at about %s and shall expire at %s", rev, step.Key, step.TTL,
			a.rec.began.Add(o.call).UTC().Format("15:04:05.000"), at.UTC().Format("15:04:05.000"))
	}
}

func holds(p raftstore.Precondition, is *raftstore.Item) bool {
	switch {
	case p.Absent:
		return is == nil
	case p.Revision != 0:
		return is != nil && is.Modified == p.Revision
	}
	return true
}

// check holds one call against the history.
func (a *audit) check(o *op) {
	switch o.kind {
	case opCommit:
		a.checkCommit(o)
	case opGet:
		if o.fate == done && !sameItem(o.item, a.h.at(o.key, o.rev)) {
			a.rep.add(a.wrong(o), "%s, but at that revision it is %s", o.describe(), show(a.h.at(o.key, o.rev)))
		}
	case opList:
		if o.fate == done {
			a.checkList(o)
		}
	}
}

func (a *audit) wrong(o *op) Kind {
	if o.kind == opList {
		return TornList
	}
	return WrongRead
}

func (a *audit) checkCommit(o *op) {
	where := a.applied[o]
	if len(where) > 1 {
		a.rep.add(Doubled, "%s, and is in the history at %v", o.describe(), where)
	}
	switch {
	case o.fate == done && len(where) == 0:
		a.checkIdle(o)
	case o.fate == done && where[0] != o.rev:
		a.rep.add(LostWrite, "%s, but it is in the history at %v", o.describe(), where)
	case (o.fate == failed || o.fate == refused) && len(where) > 0:
		a.rep.add(Resurrected, "%s, but it is in the history at %v", o.describe(), where)
	case o.fate == refused:
		a.checkConflict(o)
	}
}

// checkIdle is about a commit that was acknowledged and is not in the history:
// there must have been nothing for it to change.
func (a *audit) checkIdle(o *op) {
	for i := range o.commit.Ops {
		step := &o.commit.Ops[i]
		was := a.h.at(step.Key, o.rev)
		if step.Kind == raftstore.OpPut || step.Kind == raftstore.OpDelete && was != nil {
			if _, told := a.h.events[o.rev]; !told && o.rev < a.h.latest(math.MaxUint64) {
				a.rep.add(WatchGap, "nobody was told of revision %d: %s", o.rev, o.describe())
			} else {
				a.rep.add(LostWrite, "%s, but it is not in the history", o.describe())
			}
			return
		}
		if !holds(step.If, was) {
			a.rep.add(Broken, "%s, but %s was %s", o.describe(), step.Key, show(was))
		}
	}
}

func (a *audit) checkConflict(o *op) {
	c := o.conflict
	is := a.h.at(c.Key, c.At)
	if c.NoValue && is != nil {
		bare := *is
		bare.Value = nil
		is = &bare
	}
	if !sameItem(c.Have, is) || holds(c.Want, is) {
		a.rep.add(Broken, "%s, but at that revision %s is %s", o.describe(), c.Key, show(is))
	}
}

func (a *audit) checkList(o *op) {
	if o.read.At != 0 && o.rev != o.read.At {
		a.rep.add(WrongRead, "%s, but revision %d was asked for", o.describe(), o.read.At)
	}
	want := a.h.list(o.key, o.read.After, o.rev)
	more, rest := false, 0
	if o.read.Limit > 0 && len(want) > o.read.Limit {
		more, rest = true, len(want)-o.read.Limit
		want = want[:o.read.Limit]
	}
	if more != o.list.More || int64(rest) != o.list.Remaining {
		a.rep.add(TornList, "%s says more=%v, %d remaining; want %v, %d", o.describe(), o.list.More, o.list.Remaining, more, rest)
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
			a.rep.add(TornList, "%s: item %d is %s, want %s", o.describe(), i, name(g), name(w))
			return
		}
	}
}

func name(it *raftstore.Item) string {
	if it == nil {
		return "nothing"
	}
	return it.Key + " " + show(it)
}

// moment is the beginning or the end of a call.
type moment struct {
	at  time.Duration
	end bool
	op  *op
}

// moments are all of some calls in order; of those at the same time beginnings first.
func moments(ops []*op) []moment {
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

// revision is where in the history a call took effect, and whether it moved it.
func (a *audit) revision(o *op) (at raftstore.Revision, moved bool) {
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

// realTime checks that what began after something else had ended comes after it.
func (a *audit) realTime() {
	a.floor = make(map[*op]raftstore.Revision)
	var floor raftstore.Revision
	var by *op
	for _, m := range moments(a.rec.ops) {
		at, moved := a.revision(m.op)
		past := m.op.read.Local || m.op.read.At != 0
		switch {
		case at == 0:
		case m.end:
			if at > floor && !past {
				floor, by = at, m.op
			}
		case past || floor == 0:
		case moved && at <= floor:
			a.rep.add(WentBack, "%s took effect at revision %d, but began after the end of: %s", m.op.describe(), at, by.describe())
		case at < floor:
			a.rep.add(StaleRead, "%s, but began after the end of: %s", m.op.describe(), by.describe())
		}
	}
}

// doors checks that local reads at one replica never go back, nor behind what
// was read or committed through it before.
func (a *audit) doors() {
	type mark struct {
		at raftstore.Revision
		by *op
	}
	floors := make(map[string]mark)
	for _, m := range moments(a.rec.ops) {
		at, moved := a.revision(m.op)
		if at == 0 || m.op.read.At != 0 {
			continue
		}
		f := floors[m.op.door]
		if m.end {
			// A commit waits for its own replica until its deadline only.
			if at > f.at && (!moved || m.op.inTime) && m.op.fate != refused {
				floors[m.op.door] = mark{at, m.op}
			}
		} else if m.op.read.Local && at < f.at {
			a.rep.add(WentBack, "%s at %s, which before had: %s", m.op.describe(), m.op.door, f.by.describe())
		}
	}
}

// fences checks that no commit of an older leadership follows one of a newer.
func (a *audit) fences() {
	var newest *op
	for _, rev := range a.h.revisions {
		o := a.maker[rev]
		if o == nil || o.commit.Fence == 0 {
			continue
		}
		if newest != nil && o.commit.Fence < newest.commit.Fence {
			a.rep.add(Unfenced, "revision %d: %s follows %s", rev, o.describe(), newest.describe())
			continue
		}
		newest = o
	}
}
