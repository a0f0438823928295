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

// turn is the state of one Run.
type turn struct {
	e       *Enforcer
	nft     knftables.Interface
	applied ruleset
	built   bool              // the table in the kernel equals applied
	proven  map[string]string // hashes of the chains that have not been written since the last check
	off     bool              // the table was removed because enforcement is disabled
	seen    uint32            // ruleset generation at the last successful check
	pods    []Pod             // pods of applied
	rest    time.Time         // the table is not read again before this time, because reading a large table is expensive

	generation func() (uint32, error)                       // generation of all tables; changes with every transaction of any program
	listed     func(context.Context) (tableContents, error) // lists Keelson's table
	bridges    func() error                                 // enables filtering of bridged traffic
}

// follow programs changes until ctx ends or an error occurs.
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

// ready reports whether the view may be programmed. A view from a checkpoint may be older than the
// rules in the kernel. These rules stay until the view is confirmed, or until a pod waits for newer
// rules and the view contains all running pods.
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
		t.e.say("no control plane has been reached since the agent started, and the policies of some running pods are unknown")
	}
	return t.e.wanted() && !strangers, nil
}

// present returns the names of the objects in the table, by kind.
func (t *turn) present(ctx context.Context) (map[string][]string, error) {
	ctx, cancel := context.WithTimeout(ctx, nftLimit)
	defer cancel()
	have, err := t.nft.ListAll(ctx)
	if err != nil && !knftables.IsNotFound(err) {
		return nil, fmt.Errorf("listing the nftables table: %w", err)
	}
	return have, nil
}

// apply brings the kernel's rules to the state of the view.
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
		t.built = false // the kernel's state is unknown; the next build reads it
		return err
	}
	if to.split > 0 && t.applied.split == 0 {
		t.e.cfg.Log.Warn("the address groups of network policies exceed the limit of merged sets: the first packet of a connection passes more rules than usual",
			"sets", to.split, "limit", mergedLimit)
	}
	t.applied, t.built, t.off, t.pods = to, true, false, pods
	if anew { // record what the kernel lists right after the table was built
		t.rest = time.Time{}
		err = t.check(ctx)
	}
	t.e.show(asked, due.Revision, to)
	return err
}

// build builds the table from any state.
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
	// The kernel has an object with one of our names but another type. The table is deleted and
	// recreated in one transaction.
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

// away removes the table.
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

// check checks for changes by other programs: a firewall that is reloaded may flush all rules. It
// skips the check if the ruleset generation has not changed since the last check.
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
	t.rest = time.Now().Add(lookShare * have.cost) // use CPU time rather than elapsed time, so that checks are not delayed on a busy node
	if err == nil {
		err = errors.Join(have.differs(t.applied), have.replaced(t.proven))
	}
	if err != nil {
		t.e.cfg.Log.Warn("the rules of network policies were changed by another program and are written again: does something flush nftables?", "err", err)
		t.built = false
		return nil
	}
	t.seen, t.proven = at, have.code
	return nil
}
