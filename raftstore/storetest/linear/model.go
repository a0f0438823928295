package linear

import (
	"context"
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"strings"
	"time"

	"github.com/anishathalye/porcupine"

	"keelson.dev/keelson/raftstore"
)

// modelled is the part of the recorder's prefix with keys that do not expire, so that only commits
// change them. Only these keys are checked with porcupine, which searches for a sequential order of
// the calls.
const modelled = "k/"

// step is the part of one call that concerns one key: a write with its precondition, or a read with
// its result. The porcupine model consists of steps.
type step struct {
	key  string
	read bool
	// For a write: its kind, its value, and its precondition.
	does  raftstore.OpKind
	value string
	cond  raftstore.Precondition
	// For a read: whether the key is present, and the revision of its last change. For a write, at
	// is the revision of the write.
	present bool
	at      raftstore.Revision
}

// register is the state of one key in the porcupine model: whether it is present, and its value.
type register struct {
	present bool
	value   string
	at      raftstore.Revision // revision of the last write or deletion of the key
}

// keyModel returns the porcupine model of one key. Reads must return the last write, and a write
// must satisfy its precondition. The revision of a write must be greater than that of the previous
// write.
func keyModel() porcupine.Model {
	return porcupine.Model{
		Init: func() any { return register{} },
		Step: func(state, input, _ any) (bool, any) {
			s, in := state.(register), input.(step)
			if in.read {
				ok := in.present == s.present && in.value == s.value && (!in.present || in.at == s.at)
				return ok, s
			}
			if in.cond.Absent && s.present || in.cond.Revision != 0 && (!s.present || s.at != in.cond.Revision) {
				return false, s
			}
			switch {
			case in.does == raftstore.OpCheck, in.does == raftstore.OpDelete && !s.present:
				return true, s
			case in.does == raftstore.OpDelete:
				return in.at > s.at, register{at: in.at}
			default:
				return in.at > s.at, register{present: true, value: in.value, at: in.at}
			}
		},
		DescribeOperation: func(input, _ any) string { return fmt.Sprintf("%+v", input) },
	}
}

// searchOrder searches for a sequential order of the calls for each modelled key, such that the
// order explains the results of the calls. If no such order exists, it reports a violation to rep.
// Nearly all information comes from the calls themselves. Only a commit with an unknown outcome
// depends on the watchers: it is omitted if no watcher received it.
func (r *Recorder) searchOrder(rep *Report, a *audit, o CheckOptions) {
	timeout := o.Timeout
	if timeout == 0 {
		timeout = time.Minute
	}
	byKey := make(map[string][]porcupine.Operation)
	for i := range r.base.Items {
		it := &r.base.Items[i]
		if strings.HasPrefix(it.Key, r.prefix+modelled) {
			byKey[it.Key] = append(byKey[it.Key], porcupine.Operation{Call: -1, Return: -1,
				Input: step{key: it.Key, does: raftstore.OpPut, value: string(it.Value), at: it.Modified}})
		}
	}
	for n, o := range r.ops {
		for _, s := range r.stepsOf(a, o) {
			p := porcupine.Operation{ClientId: n, Input: s, Call: o.call.Nanoseconds(), Return: o.ret.Nanoseconds()}
			if o.fate == unknown {
				p.Return = math.MaxInt64
			}
			byKey[s.key] = append(byKey[s.key], p)
		}
	}
	deadline := time.Now().Add(timeout)
	for key, ops := range byKey {
		// Also if no time is left; the result is then Undecided.
		switch porcupine.CheckOperationsTimeout(keyModel(), ops, max(time.Millisecond, time.Until(deadline))) {
		case porcupine.Illegal:
			rep.addViolation(Linear, "the %d calls about %s%s", len(ops), key, drawOrder(o.Dir, key, ops))
		case porcupine.Unknown:
			rep.addViolation(Undecided, "no order found for the %d calls about %s within %s, and no proof that there "+
				"is none", len(ops), key, timeout)
		}
	}
}

// drawOrder writes an HTML page to dir that visualizes the longest partial order found for a key.
// It returns text for the violation with the page's path, or "" if dir is empty.
func drawOrder(dir, key string, ops []porcupine.Operation) string {
	if dir == "" {
		return ""
	}
	_, info := porcupine.CheckOperationsVerbose(keyModel(), ops, 10*time.Second)
	path := filepath.Join(dir, strings.Trim(strings.ReplaceAll(key, "/", "-"), "-")+".html")
	if err := porcupine.VisualizePath(keyModel(), info, path); err != nil {
		return fmt.Sprintf(" (not drawn: %v)", err)
	}
	return ", drawn in " + path
}

// stepsOf returns the steps of a call, one for each modelled key that the call concerns. A commit
// without effect has no steps. A read of a past or local state, or of a part of a list, has no
// steps either.
func (r *Recorder) stepsOf(a *audit, o *op) []step {
	in := func(key string) bool { return strings.HasPrefix(key, r.prefix+modelled) }
	var out []step
	switch {
	case o.kind == opCommit && (o.fate == done || o.fate == unknown && len(a.applied[o]) > 0):
		at := o.rev
		if o.fate == unknown {
			at = a.applied[o][0]
		}
		for _, c := range o.commit.Ops {
			if in(c.Key) {
				out = append(out, step{key: c.Key, does: c.Kind, value: string(c.Value), cond: c.If, at: at})
			}
		}
	case o.fate == refused && in(o.conflict.Key) && !o.conflict.NoValue:
		out = append(out, readStep(o.conflict.Key, o.conflict.Have))
	case o.fate != done || o.read.Local || o.read.At != 0 || o.read.Limit != 0 || o.read.After != "":
	case o.kind == opGet && in(o.key):
		out = append(out, readStep(o.key, o.item))
	case o.kind == opList:
		shown := make(map[string]*raftstore.Item)
		for i := range o.list.Items {
			shown[o.list.Items[i].Key] = &o.list.Items[i]
		}
		for key := range a.h.versions {
			if in(key) && strings.HasPrefix(key, o.key) {
				out = append(out, readStep(key, shown[key]))
			}
		}
	}
	return out
}

// readStep returns the step of a read that returned the item it. nil means that the key was absent.
func readStep(key string, it *raftstore.Item) step {
	if it == nil {
		return step{key: key, read: true}
	}
	return step{key: key, read: true, present: true, value: string(it.Value), at: it.Modified}
}

// formatCall returns the call and its result as text for a violation.
func (o *op) formatCall() string {
	var b strings.Builder
	switch o.kind {
	case opCommit:
		b.WriteString("commit {")
		for i, c := range o.commit.Ops {
			if i > 0 {
				b.WriteString("; ")
			}
			b.WriteString([]string{"?", "put ", "delete ", "check "}[c.Kind&3] + c.Key)
			if c.Kind == raftstore.OpPut {
				fmt.Fprintf(&b, "=%q", c.Value)
			}
			if c.If.Absent {
				b.WriteString(" if absent")
			} else if c.If.Revision != 0 {
				fmt.Fprintf(&b, " if at %d", c.If.Revision)
			}
		}
		b.WriteString("}")
		if o.commit.Fence != 0 {
			fmt.Fprintf(&b, " under fence %d", o.commit.Fence)
		}
	case opGet:
		b.WriteString("get " + o.key)
	case opList:
		fmt.Fprintf(&b, "list %s after %q limit %d at %d", o.key, o.read.After, o.read.Limit, o.read.At)
	case opSync:
		b.WriteString("sync")
	}
	if o.read.Local {
		b.WriteString(" (local)")
	}
	fmt.Fprintf(&b, " [%.3f-%.3f s] ", o.call.Seconds(), o.ret.Seconds())
	switch {
	case o.fate == refused:
		fmt.Fprintf(&b, "refused at revision %d as %s is %s", o.conflict.At, o.conflict.Key,
			formatItem(o.conflict.Have))
	case o.fate != done:
		fmt.Fprintf(&b, "failed: %v", o.err)
	case o.kind == opGet:
		fmt.Fprintf(&b, "showed %s at revision %d", formatItem(o.item), o.rev)
	case o.kind == opList:
		fmt.Fprintf(&b, "showed %d items at revision %d", len(o.list.Items), o.rev)
	default:
		fmt.Fprintf(&b, "returned revision %d", o.rev)
	}
	return b.String()
}

func isUnknown(err error) bool {
	return errors.Is(err, raftstore.ErrOutcomeUnknown) || errors.Is(err, context.DeadlineExceeded) ||
		errors.Is(err, context.Canceled)
}
