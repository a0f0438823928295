package keyrotation

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"time"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/keyrotation/rotation"
	"keelson.dev/keelson/internal/wait"
)

// A replica that missed a rotation has stale keys: the other replicas reject its signatures, and it
// rejects those of the other replicas. Each replica therefore compares its keys with the keys of
// the other replicas: before it requests membership, and periodically.

const (
	confirmedInterval   = time.Minute      // interval of comparisons after another replica with the same keys was found
	staleInterval       = 2 * time.Second  // interval of comparisons while the keys of this replica are stale
	unconfirmedInterval = 10 * time.Second // interval of comparisons while no replica with the same keys responds
	// stepDownTimeout is the timeout of one attempt of a leader with stale keys to transfer
	// leadership.
	stepDownTimeout = 10 * time.Second
	// joinTimeout is the timeout of the comparison before a replica requests membership. The
	// replica also requests membership after a timeout.
	joinTimeout = 5 * time.Second
)

// StaleKeys describes why the keys of this replica are stale.
type StaleKeys struct {
	Message string
	Since   int64 // milliseconds since 1970
}

// StaleKeys describes why this replica has stale keys and must not serve. It returns nil if the
// keys are not known to be stale.
func (r *Rotator) StaleKeys() *StaleKeys { return r.stale.Load() }

// CompareKeys compares the keys of this replica with the keys of the other members until ctx ends.
// A leader with stale keys transfers leadership.
func (r *Rotator) CompareKeys(ctx context.Context) error {
	for {
		pause := staleInterval
		if r.config.Store.Ready() {
			problem, known := r.compareWithMembers(ctx)
			if known {
				r.setStale(problem)
			}
			switch {
			case r.stale.Load() != nil:
				r.transferLeadership(ctx)
			case known:
				pause = confirmedInterval
			default:
				pause = unconfirmedInterval
			}
		}
		if err := wait.Delay(ctx, pause); err != nil {
			return err
		}
	}
}

// transferLeadership transfers leadership to another replica if this replica is the leader and has
// stale keys. The leader has the virtual IP address of the API, so all nodes and clients would
// receive signatures of the stale key.
func (r *Rotator) transferLeadership(ctx context.Context) {
	if r.config.Store.Status().Leader != r.config.Name {
		return
	}
	limited, cancel := context.WithTimeout(ctx, stepDownTimeout)
	defer cancel()
	leader, err := r.config.Store.StepDown(limited, "")
	if err != nil {
		r.config.Log.Warn("this replica leads with stale keys and cannot transfer leadership", "err", err)
		return
	}
	r.config.Log.Info("this replica has stale keys: leadership is transferred", "leader", leader)
}

// setStale stores the reason why the keys of this replica are stale. An empty problem means that
// they are not stale.
func (r *Rotator) setStale(problem string) {
	previous := r.stale.Load()
	switch {
	case problem == "" && previous != nil:
		r.stale.Store(nil)
		r.config.Log.Info("this replica has the keys of the other replicas again")
	case problem != "" && (previous == nil || previous.Message != problem):
		r.stale.Store(&StaleKeys{Message: problem, Since: time.Now().UnixMilli()})
		r.config.Log.Error("this replica does not serve, because its keys are stale", "err", problem)
	}
}

// compareWithMembers compares the keys of this replica with the keys of all members. It returns why
// they are stale, or "". If known is false, the comparison is inconclusive, and the previous result
// remains valid.
//
// The comparison is inconclusive if the keys of this replica change during it. Keys are stale only
// if a second comparison confirms it: a new member may be about to perform the step of a rotation.
func (r *Rotator) compareWithMembers(ctx context.Context) (problem string, known bool) {
	for range 2 {
		before := r.keys.allKeys()
		record := *r.keys.current.Load()
		others := r.collectReports(ctx)
		if ctx.Err() != nil || !reflect.DeepEqual(before, r.keys.allKeys()) ||
			r.keys.current.Load().Step != record.Step {
			return "", false
		}
		if problem, known = r.findStaleKey(record, others); problem == "" {
			return "", known
		}
		if wait.Delay(ctx, staleInterval/2) != nil {
			return "", false
		}
	}
	return problem, true
}

// CompareWithPeer compares the keys of this replica with those of all members, as the member at the
// address peer reports them. It returns an error if the keys of this replica are stale. It is
// called before this replica becomes a member. A member that does not report all keys, such as a
// member of a previous release, causes no error.
func (r *Rotator) CompareWithPeer(ctx context.Context, peer string) error {
	ctx, cancel := context.WithTimeout(ctx, joinTimeout)
	defer cancel()
	all, err := r.config.Replica.FetchClusterKeys(ctx, peer)
	if err != nil {
		return nil
	}
	var record rotation.Record
	if current := all.Rotation; current != nil {
		record = rotation.Record{Kind: rotation.Kind(current.Kind), Step: rotation.Step(current.Step), New: current.New,
			Old: current.Old}
	}
	problem, known := r.findStaleKey(record, all.Replicas)
	if known {
		r.setStale(problem)
	}
	if problem != "" {
		return errors.New(problem)
	}
	return nil
}

// findStaleKey describes the first key of this replica that the other replicas have replaced.
// problem is "" if no key is stale. known is false if other replicas exist, but none of them has
// the same keys as this replica.
func (r *Rotator) findStaleKey(record rotation.Record, reports []api.ClusterKeyHolder) (problem string, known bool) {
	known = true
	for _, kind := range rotation.ComparedKinds() {
		held := r.keys.keysOf(kind)
		own := rotation.KeyIDs{Signing: held.Signs, Trusted: held.Believes}
		var others []rotation.Member
		for _, m := range membersOf(kind, reports) {
			if m.Name != r.config.Name {
				others = append(others, m)
			}
		}
		known = known && rotation.IsConfirmed(own, others)
		if rotation.IsStale(record, kind, own, others) {
			return fmt.Sprintf("replica %s has the %s %s, which was rotated while the replica was away: stop it, "+
				"move its data directory %s aside, "+
				"and join it again: 'keelson-controlplane join' with a token of 'kctl cluster token create "+
				"--role controlplane'",
				r.config.Name, kind, own.Signing, r.config.DataDir), true
		}
	}
	return "", known
}
