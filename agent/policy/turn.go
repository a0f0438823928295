package policy

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"time"

	"sigs.k8s.io/knftables"

	"keelson.dev/keelson/agent"
)

// turn is one Run: what it has programmed, and what it goes by.
type turn struct {
	e       *Enforcer
	nft     knftables.Interface
	applied ruleset
	built   bool              // the table is in the kernel as applied says
	proven  map[string]string // the chains that were not written since the last look, as it showed them
	off     bool              // it was taken away, for it is not our affair
	seen    uint32            // the generation of all tables in which ours was known to be whole
	pods    []Pod             // of applied
	rest    time.Time         // until when the table is not read again: reading a large one takes its time

	generation func() (uint32, error)                       // of all tables; moves with each change by anybody
	listed     func(context.Context) (tableContents, error) // of ours
	bridges    func() error                                 // has bridged traffic filtered
}

// follow programs until ctx ends or something fails.
func (t *turn) follow(ctx context.Context, changes <-chan agent.Changed) error {
	tick := time.NewTicker(t.e.every)
	defer tick.Stop()
	var due agent.Changed
	select {
	case c, ok := <-changes:
		if !ok {
			return ctx.Err()
		}
		due = c
	case <-ctx.Done():
		return ctx.Err()
	}
	due.All = true
	confirmed := t.e.cfg.Objects.Confirmed()
	for {
		off := t.e.cfg.Off()
		switch {
		case off && !t.off:
			if err := t.away(ctx); err != nil {
				return err
			}
		case !off:
			certain := closed(t.e.cfg.Objects.Confirmed())
			if ready, err := t.ready(ctx, certain); err != nil {
				return err
			} else if ready {
				if err := t.apply(ctx, due, certain); err != nil {
					return err
				}
				due = agent.Changed{Revision: due.Revision}
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case c, ok := <-changes:
			if !ok {
				return ctx.Err()
			}
			due.And(c)
		case <-t.e.wake:
		case <-confirmed:
			confirmed = nil
		case <-tick.C:
			if err := t.check(ctx); err != nil {
				return err
			}
		}
	}
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// ready says whether the view may be programmed. One that comes from a checkpoint may be older than the rules in the
// kernel: those stay until the view is certain or a pod cannot start without newer ones, and where the view lacks a pod
// that runs, even then.
func (t *turn) ready(ctx context.Context, certain bool) (bool, error) {
	if t.built || certain {
		return true, nil
	}
	have, err := t.present(ctx)
	if err != nil {
		return false, err
	}
	if len(have["chain"]) == 0 {
		return true, nil
	}
	_, _, strangers := t.e.pods(false)
	if t.e.wanted() && strangers {
		t.e.say("no control plane has been reached since the agent started, and pods run here of which it is not known what they may do")
	}
	return t.e.wanted() && !strangers, nil
}

// present are the names of what is in our table, by kind.
func (t *turn) present(ctx context.Context) (map[string][]string, error) {
	ctx, cancel := context.WithTimeout(ctx, nftLimit)
	defer cancel()
	have, err := t.nft.ListAll(ctx)
	if err != nil && !knftables.IsNotFound(err) {
		return nil, fmt.Errorf("listing our nftables table: %w", err)
	}
	return have, nil
}

// apply brings the kernel to the view.
func (t *turn) apply(ctx context.Context, due agent.Changed, certain bool) error {
	pods, asked, _ := t.e.pods(certain)
	groups, shape := map[string]bool{}, !t.built || due.All || !reflect.DeepEqual(pods, t.pods)
	for k := range due.Keys {
		switch k.Kind {
		case "AddressGroup":
			groups[k.Name] = true
		case "NetworkPolicy":
			shape = true
		}
	}
	to := t.applied
	if shape {
		to.shape = compile(pods, t.e.read.all(t.e.cfg.Objects.NetworkPolicies(), t.e.cfg.Log))
	}
	if shape || len(groups) > 0 {
		to = to.shape.withSets(t.applied.sets, func(g string) bool { return due.All || groups[g] }, t.e.cfg.Objects.AddressGroup)
	}
	var err error
	anew := !t.built
	if !anew {
		maps.DeleteFunc(t.proven, func(name, _ string) bool { return !slices.Equal(t.applied.chains[name], to.chains[name]) })
		tx := t.nft.NewTransaction()
		change(tx, t.applied, to)
		err = t.run(ctx, tx)
	} else {
		t.proven = nil
		err = t.build(ctx, to)
	}
	if err != nil {
		t.built = false // whatever is there: it is looked at
		return err
	}
	if to.split > 0 && t.applied.split == 0 {
		t.e.cfg.Log.Warn("there is no room to merge all groups that network policies name: more rules than usual are walked by the first packet of a connection",
			"sets", to.split, "limit", mergedLimit)
	}
	t.applied, t.built, t.off, t.pods = to, true, false, pods
	if anew { // what the table shows now is what was made
		t.rest = time.Time{}
		err = t.check(ctx)
	}
	t.e.show(asked, due.Revision, to)
	return err
}

// build makes the table from whatever is there.
func (t *turn) build(ctx context.Context, to ruleset) error {
	if err := t.bridges(); err != nil {
		return err
	}
	have, err := t.present(ctx)
	if err != nil {
		return err
	}
	tx := t.nft.NewTransaction()
	rebuild(tx, have, to, bridge)
	gentle := t.run(ctx, tx)
	if gentle == nil {
		return nil
	}
	// Something of our names is not what we make: the table goes, and comes in the same moment.
	tx = t.nft.NewTransaction()
	tx.Add(&knftables.Table{})
	tx.Delete(&knftables.Table{})
	rebuild(tx, nil, to, bridge)
	if err := t.run(ctx, tx); err != nil {
		return errors.Join(gentle, err)
	}
	return nil
}

func (t *turn) run(ctx context.Context, tx *knftables.Transaction) error {
	if tx.NumOperations() == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, nftLimit)
	defer cancel()
	if err := t.nft.Run(ctx, tx); err != nil {
		return fmt.Errorf("nft transaction of %d steps: %w", tx.NumOperations(), err)
	}
	return nil
}

// away takes our table away.
func (t *turn) away(ctx context.Context) error {
	tx := t.nft.NewTransaction()
	tx.Add(&knftables.Table{})
	tx.Delete(&knftables.Table{})
	if err := t.run(ctx, tx); err != nil {
		return err
	}
	t.applied, t.built, t.off, t.pods = ruleset{}, false, true, nil
	return nil
}

// check looks after damage: firewalls that are reloaded flush more than their own rules. As long as nobody has changed
// any table since the last look, which the kernel counts, there is none.
func (t *turn) check(ctx context.Context) error {
	if !t.built || time.Now().Before(t.rest) {
		return nil
	}
	at, err := t.generation()
	if err != nil || at == t.seen {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, nftLimit)
	defer cancel()
	have, err := t.listed(ctx)
	t.rest = time.Now().Add(lookShare * have.cost) // not by the time that it took: on a node that is busy damage would be seen late
	if err == nil {
		err = errors.Join(have.differs(t.applied), have.replaced(t.proven))
	}
	if err != nil {
		t.e.cfg.Log.Warn("the rules of network policies are not as they were made, and are made anew: does something flush nftables?", "err", err)
		t.built = false
		return nil
	}
	t.seen, t.proven = at, have.code
	return nil
}
