package keyrotation

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/keyrotation/rotation"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/replica"
)

const (
	stepInterval  = 300 * time.Millisecond // interval of the leader's checks during a step
	waitInterval  = 5 * time.Second        // interval of these checks during the step wait, which takes hours
	reportTimeout = time.Second            // timeout of requests for the keys of the other replicas
)

// Lead commits the next step of a rotation whenever all replicas and nodes have reported that they
// have completed the current step. It runs while this replica is the leader in the raft term fence,
// and returns when ctx ends.
func (r *Rotator) Lead(ctx context.Context, fence raftstore.Fence) error {
	logged := ""
	for {
		var next <-chan time.Time
		if record := r.keys.current.Load(); record.Active() {
			waiting, err := r.advanceRotation(ctx, fence)
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if err != nil {
				return fmt.Errorf("rotation of %s: %w", record.Kind, err)
			}
			if reasons := strings.Join(waiting, "; "); reasons != logged {
				logged = reasons
				r.config.Log.Info("the key rotation waits", "kind", record.Kind, "step", record.Step, "for", reasons)
			}
			interval := stepInterval
			if record.Step == rotation.Wait && len(waiting) > 0 {
				interval = waitInterval
			}
			next = time.After(interval)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-r.keys.changed:
		case <-next:
		}
	}
}

// advanceRotation commits the next step if nothing blocks it, and otherwise returns the reasons. No
// replica can become a member during the call, because it would have the keys of the previous step.
func (r *Rotator) advanceRotation(ctx context.Context, fence raftstore.Fence) (waiting []string, err error) {
	err = r.config.Store.HoldMembers(ctx, func(ctx context.Context, _ []replica.MemberLevel) error {
		record, revision, err := r.readRecord(ctx, raftstore.ReadOptions{})
		if err != nil || !record.Active() || record.Version > rotation.Version {
			return err
		}
		reports := r.collectReports(ctx)
		record, changed := addUsers(record, reports)
		users := r.usersOfPreviousKey(record)
		if record.Step == rotation.Wait && len(users) > 0 && (record.Force || time.Now().UnixMilli() >= record.Until) {
			if err := r.signSecrets(ctx, r.secretsOfPreviousKey(record), uint64(fence)); err != nil {
				return err
			}
		}
		state := rotation.ClusterState{Members: membersOf(record.Kind, reports), Users: users}
		var next rotation.Record
		if next, waiting, err = r.nextRecord(ctx, record, state, reports); err != nil ||
			next.Step == record.Step && !changed {
			return err
		}
		if next.Step == rotation.Aborted {
			r.config.Log.Warn("the key rotation concerns no current key, as in a restored backup: it is aborted, "+
				"and no key changes",
				"kind", record.Kind, "step", record.Step, "new", record.New, "old", record.Old)
		}
		return commitRecord(ctx, r.config.Store, next, revision, fence)
	})
	return waiting, err
}

// nextRecord returns the result of rotation.Next, the record of the next step. For a rotation of
// the cluster CA, it adds the nodes to state: first the cached nodes, and all nodes of the store if
// no cached node blocks the step.
func (r *Rotator) nextRecord(
	ctx context.Context, record rotation.Record, state rotation.ClusterState, reports []api.ClusterKeyHolder,
) (
	next rotation.Record, waiting []string, err error,
) {
	if record.Kind == rotation.ClusterCA {
		state.Nodes = nodesOf(cachedNodes(r.informers), reports)
	}
	if next, waiting = rotation.Next(record, state, time.Now()); next.Step == record.Step ||
		record.Kind != rotation.ClusterCA {
		return next, waiting, nil
	}
	names, err := r.listNodes(ctx)
	if err != nil {
		return record, nil, err
	}
	state.Nodes = nodesOf(names, reports)
	next, waiting = rotation.Next(record, state, time.Now())
	return next, waiting, nil
}

// addUsers returns record with the users of the old CA that are in reports. The bool is true if the
// record has changed.
func addUsers(record rotation.Record, reports []api.ClusterKeyHolder) (rotation.Record, bool) {
	seen := map[string]rotation.User{}
	for _, report := range reports {
		for serial, u := range report.Users {
			if record.Step == rotation.Wait && u.Seen >= seen[serial].LastUsed {
				seen[serial] = rotation.User{Name: u.Name, Expires: u.Ends, LastUsed: u.Seen}
			}
		}
	}
	return record.AddUsers(seen)
}

// readRecord returns the stored record of the rotation and its revision. The revision is 0 if there
// is no record.
func (r *Rotator) readRecord(ctx context.Context, o raftstore.ReadOptions) (
	record rotation.Record, revision raftstore.Revision, err error,
) {
	item, _, err := r.config.Store.Get(ctx, recordKey, o)
	if errors.Is(err, raftstore.ErrNotFound) {
		return record, 0, nil
	}
	if err != nil {
		return record, 0, err
	}
	record, err = decodeRecord(item.Value)
	return record, item.Modified, err
}

// commitRecord writes record to the store, if the stored record still has the given revision. The
// revision 0 means that no record is stored.
func commitRecord(
	ctx context.Context, store Store, record rotation.Record, revision raftstore.Revision, fence raftstore.Fence,
) error {
	raw, err := json.Marshal(record)
	if err != nil {
		return err
	}
	op := raftstore.Update(recordKey, raw, revision)
	if revision == 0 {
		op = raftstore.Create(recordKey, raw)
	}
	_, err = store.Commit(ctx, raftstore.Commit{Ops: []raftstore.Op{op}, Fence: fence})
	return err
}

// membersOf returns the IDs of each member's keys of the given kind, from reports, the reports of
// the members.
func membersOf(kind rotation.Kind, reports []api.ClusterKeyHolder) (members []rotation.Member) {
	for _, report := range reports {
		m := rotation.Member{Name: report.Name, Problem: report.Problem}
		i := slices.IndexFunc(report.Keys, func(k api.ClusterKeyHeld) bool { return k.Kind == string(kind) })
		switch {
		case m.Problem != "":
		case i < 0:
			m.Problem = "its release does not support this kind of key"
		default:
			held := report.Keys[i]
			m.Problem, m.Keys = held.Problem, rotation.KeyIDs{Signing: held.Signs, Trusted: held.Believes,
				Serving: held.Serves}
		}
		members = append(members, m)
	}
	return members
}

// collectReports requests the keys of every member from that member. If a member does not respond
// in time, its report contains the problem and no keys.
func (r *Rotator) collectReports(ctx context.Context) []api.ClusterKeyHolder {
	ctx, cancel := context.WithTimeout(ctx, reportTimeout)
	defer cancel()
	members := r.config.Store.Status().Members
	reports := make([]api.ClusterKeyHolder, len(members))
	var pending sync.WaitGroup
	for i, m := range members {
		if m.ID == r.config.Name {
			reports[i] = r.OwnReport()
			continue
		}
		pending.Go(func() {
			reports[i] = fetchReport(ctx, r.config.Replica, m.Address)
			reports[i].Name = m.ID
		})
	}
	pending.Wait()
	slices.SortFunc(reports, func(a, b api.ClusterKeyHolder) int { return cmp.Compare(a.Name, b.Name) })
	return reports
}

func fetchReport(ctx context.Context, own Replica, peer string) api.ClusterKeyHolder {
	all, err := own.FetchOwnKeys(ctx, peer)
	if err == nil && len(all.Replicas) != 1 {
		err = fmt.Errorf("%s: %d replicas instead of one", api.PathClusterKeys, len(all.Replicas))
	}
	if err != nil {
		return api.ClusterKeyHolder{Problem: "it does not answer: " + err.Error()}
	}
	return all.Replicas[0]
}

// usersOfPreviousKey describes the users of the previous key for which the rotation waits. For the
// service account key, the users are Secrets with tokens of the previous key, which do not expire.
func (r *Rotator) usersOfPreviousKey(record rotation.Record) (users []string) {
	if record.Kind == rotation.ClusterCA {
		if record.Step == rotation.Wait {
			return r.usersOfPreviousCA(record)
		}
		return nil
	}
	for _, s := range r.secretsOfPreviousKey(record) {
		users = append(users,
			fmt.Sprintf("Secret %s/%s: it gets a new token at the end of this step, and its current token becomes "+
				"invalid", s.Namespace, s.Name))
	}
	slices.Sort(users)
	return users
}

func (r *Rotator) secretsOfPreviousKey(record rotation.Record) (secrets []*v1.Secret) {
	if record.Kind != rotation.ServiceAccountKey || record.Step != rotation.Wait {
		return nil
	}
	for _, o := range client.Informer[*v1.Secret](r.informers).GetStore().List() {
		s, ok := o.(*v1.Secret)
		if ok && s.Type == v1.SecretTypeServiceAccountToken &&
			pki.ParseKeyID(string(s.Data[v1.ServiceAccountTokenKey])) == record.Old {
			secrets = append(secrets, s)
		}
	}
	return secrets
}

// signSecrets replaces the token in each Secret by a token of the current service account key. It
// skips a Secret that was deleted or changed meanwhile.
func (r *Rotator) signSecrets(ctx context.Context, secrets []*v1.Secret, fence uint64) error {
	c := asAPIServer(r.client).Fenced(fence)
	var errs []error
	for _, s := range secrets {
		account := &v1.ServiceAccount{}
		account.Namespace, account.Name = s.Namespace, s.Annotations[v1.ServiceAccountNameKey]
		account.UID = types.UID(s.Annotations[v1.ServiceAccountUIDKey])
		token, err := r.SignSecretToken(account, s.Name)
		if err != nil {
			return err
		}
		next := s.DeepCopy()
		next.Data[v1.ServiceAccountTokenKey] = []byte(token)
		if _, err := client.Update(ctx, c, next); err != nil && !apierrors.IsNotFound(err) &&
			!apierrors.IsConflict(err) {
			errs = append(errs, fmt.Errorf("writing a new token to Secret %s/%s: %w", s.Namespace, s.Name, err))
		}
	}
	return errors.Join(errs...)
}
