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

// enforcerRun is the state of one call of Enforcer.Run.
type enforcerRun struct {
	e                 *Enforcer
	nft               knftables.Interface
	applied           ruleset
	built             bool              // the table in the kernel equals the ruleset applied
	chainCode         map[string]string // hashes of the chains that have not been written since the last check
	disabled          bool              // the table was removed because enforcement is disabled
	checkedGeneration uint32            // ruleset generation at the last successful check
	pods              []Pod             // pods of applied
	// the table is not read again before this time, because reading a large table is expensive
	nextCheck time.Time

	// generation of all tables; changes with every transaction of any program
	generation    func() (uint32, error)
	listTable     func(context.Context) (tableContents, error) // lists Keelson's table
	filterBridges func() error                                 // enables filtering of bridged traffic
}

// programChanges programs the kernel's rules for the initial view and after each change, until ctx
// ends or an error occurs. It also checks regularly for changes by other programs.
func (t *enforcerRun) programChanges(ctx context.Context, changes <-chan agent.ObjectChanges) error {
	tick := time.NewTicker(t.e.interval)
	defer tick.Stop()
	var due agent.ObjectChanges
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
		off := t.e.cfg.Disabled()
		switch {
		case off && !t.disabled:
			if err := t.removeTable(ctx); err != nil {
				return err
			}
		case !off:
			certain := isClosed(t.e.cfg.Objects.Confirmed())
			if ready, err := t.isViewUsable(ctx, certain); err != nil {
				return err
			} else if ready {
				if err := t.applyView(ctx, due, certain); err != nil {
					return err
				}
				due = agent.ObjectChanges{Revision: due.Revision}
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case c, ok := <-changes:
			if !ok {
				return ctx.Err()
			}
			due.Merge(c)
		case <-t.e.wake:
		case <-confirmed:
			confirmed = nil
		case <-tick.C:
			if err := t.checkTable(ctx); err != nil {
				return err
			}
		}
	}
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// isViewUsable reports whether rules may be computed from the node's view now. confirmed means that
// a control plane has confirmed the view. A view from a checkpoint may be older than the rules in
// the kernel. It is usable if the kernel has no rules. It is also usable if a pod waits for newer
// rules and the view contains all running pods.
func (t *enforcerRun) isViewUsable(ctx context.Context, confirmed bool) (bool, error) {
	if t.built || confirmed {
		return true, nil
	}
	have, err := t.listNames(ctx)
	if err != nil {
		return false, err
	}
	if len(have["chain"]) == 0 {
		return true, nil
	}
	_, _, strangers := t.e.podsWithAddresses(false)
	if t.e.hasWaiters() && strangers {
		t.e.setReason("no control plane has been reached since the agent started, and the policies of some running " +
			"pods are unknown")
	}
	return t.e.hasWaiters() && !strangers, nil
}

// listNames returns the names of the objects in Keelson's nftables table, by kind ("chain", "set",
// "map").
func (t *enforcerRun) listNames(ctx context.Context) (map[string][]string, error) {
	ctx, cancel := context.WithTimeout(ctx, nftLimit)
	defer cancel()
	have, err := t.nft.ListAll(ctx)
	if err != nil && !knftables.IsNotFound(err) {
		return nil, fmt.Errorf("listing the nftables table: %w", err)
	}
	return have, nil
}

// applyView updates the kernel's rules to the state of the node's view. changes lists the changed
// objects since the last call. confirmed means that a control plane has confirmed the view.
func (t *enforcerRun) applyView(ctx context.Context, changes agent.ObjectChanges, confirmed bool) error {
	pods, asked, _ := t.e.podsWithAddresses(confirmed)
	groups, shape := map[string]bool{}, !t.built || changes.All || !reflect.DeepEqual(pods, t.pods)
	for k := range changes.Keys {
		switch k.Kind {
		case "AddressGroup":
			groups[k.Name] = true
		case "NetworkPolicy":
			shape = true
		}
	}
	to := t.applied
	if shape {
		to.ruleShape = compileRules(pods, t.e.policies.parseAll(t.e.cfg.Objects.NetworkPolicies(), t.e.cfg.Log))
	}
	if shape || len(groups) > 0 {
		to = to.ruleShape.withSets(t.applied.sets, func(g string) bool {
			return changes.All || groups[g]
		}, t.e.cfg.Objects.AddressGroup)
	}
	var err error
	rebuild := !t.built
	if !rebuild {
		maps.DeleteFunc(t.chainCode, func(name, _ string) bool {
			return !slices.Equal(t.applied.chains[name], to.chains[name])
		})
		tx := t.nft.NewTransaction()
		addChanges(tx, t.applied, to)
		err = t.runTransaction(ctx, tx)
	} else {
		t.chainCode = nil
		err = t.buildTable(ctx, to)
	}
	if err != nil {
		t.built = false // the kernel's state is unknown; the next build reads it
		return err
	}
	if to.unmergedSets > 0 && t.applied.unmergedSets == 0 {
		t.e.cfg.Log.Warn("the address groups of network policies exceed the limit of merged sets: the first packet of "+
			"a connection passes more rules than usual",
			"sets", to.unmergedSets, "limit", mergedLimit)
	}
	t.applied, t.built, t.disabled, t.pods = to, true, false, pods
	if rebuild { // record what the kernel lists right after the table was built
		t.nextCheck = time.Time{}
		err = t.checkTable(ctx)
	}
	t.e.recordApplied(asked, changes.Revision, to)
	return err
}

// buildTable replaces the table in the kernel with the ruleset wanted, whatever the table contains.
func (t *enforcerRun) buildTable(ctx context.Context, wanted ruleset) error {
	if err := t.filterBridges(); err != nil {
		return err
	}
	have, err := t.listNames(ctx)
	if err != nil {
		return err
	}
	tx := t.nft.NewTransaction()
	addRebuild(tx, have, wanted, bridge)
	gentle := t.runTransaction(ctx, tx)
	if gentle == nil {
		return nil
	}
	// The kernel has an object with one of our names but another type. The table is deleted and
	// recreated in one transaction.
	tx = t.nft.NewTransaction()
	tx.Add(&knftables.Table{})
	tx.Delete(&knftables.Table{})
	addRebuild(tx, nil, wanted, bridge)
	if err := t.runTransaction(ctx, tx); err != nil {
		return errors.Join(gentle, err)
	}
	return nil
}

func (t *enforcerRun) runTransaction(ctx context.Context, tx *knftables.Transaction) error {
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

// removeTable removes Keelson's nftables table, so that no policy is enforced.
func (t *enforcerRun) removeTable(ctx context.Context) error {
	tx := t.nft.NewTransaction()
	tx.Add(&knftables.Table{})
	tx.Delete(&knftables.Table{})
	if err := t.runTransaction(ctx, tx); err != nil {
		return err
	}
	t.applied, t.built, t.disabled, t.pods = ruleset{}, false, true, nil
	return nil
}

// checkTable checks whether another program has changed Keelson's table. For example, reloading a
// firewall may flush all rules. If so, the next applyView rebuilds the table. The check is skipped
// if the ruleset generation has not changed since the last check.
func (t *enforcerRun) checkTable(ctx context.Context) error {
	if !t.built || time.Now().Before(t.nextCheck) {
		return nil
	}
	at, err := t.generation()
	if err != nil || at == t.checkedGeneration {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, nftLimit)
	defer cancel()
	have, err := t.listTable(ctx)
	// use CPU time rather than elapsed time, so that checks are not delayed on a busy node
	t.nextCheck = time.Now().Add(checkCostFactor * have.cost)
	if err == nil {
		err = errors.Join(have.findDifference(t.applied), have.findReplacedChain(t.chainCode))
	}
	if err != nil {
		t.e.cfg.Log.Warn("the rules of network policies were changed by another program and are written again: does "+
			"something flush nftables?", "err", err)
		t.built = false
		return nil
	}
	t.checkedGeneration, t.chainCode = at, have.code
	return nil
}
