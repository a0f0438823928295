package membership

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/clusterhttp"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/raftstore"
)

// A removed replica may still have every key that the replicas share. The record of removed members
// lists the IDs of these keys, so that operators see which of the keys are still valid. The
// cluster's secret, from which other keys are derived, cannot be rotated and always remains valid.
// A removed member therefore stays in the record until an operator confirms that its disk is wiped
// (DismissRemovedMember).

const (
	removedRecordVersion  = 1
	maxRemovedMembers     = 64  // maximum number of recorded removals; the oldest are deleted first
	maxRemovalReasonBytes = 512 // maximum size of the recorded reason, in bytes
	// removalRecordTimeout is the timeout of writing the list of removed members. It is short, so
	// that most of the time of a request is left for the removal itself.
	removalRecordTimeout = 2 * time.Second
	// clusterSecretKind is the kind, in lists of keys, of the secret from which other keys of the
	// cluster are derived. This secret cannot be rotated.
	clusterSecretKind = "cluster-secret"
)

// heldSharedKeys returns the IDs of the keys that this replica has and that all replicas share. It
// includes the ID of the cluster's secret (pki.Trust.EncryptionKey).
func heldSharedKeys(keys Keys, trust *pki.Trust) []api.ClusterKeyHeld {
	return append(keys.HeldKeys(), heldClusterSecret(trust))
}

// heldClusterSecret returns the ID of the cluster's secret, from which other keys are derived. It
// is the same on every replica.
func heldClusterSecret(trust *pki.Trust) api.ClusterKeyHeld {
	return api.ClusterKeyHeld{Kind: clusterSecretKind, Signs: trust.SecretID()}
}

// removedMembersRecord is the stored list of removed members. Later releases may add fields. A
// record with a later version is read, but not changed.
type removedMembersRecord struct {
	Version int             `json:"version"`
	Members []removedMember `json:"members"`
}

// removedMember is an entry in the list of removed members. It describes one removal.
type removedMember struct {
	Name      string              `json:"name"`
	RemovedAt int64               `json:"atUnixMs"`
	KeyIDs    map[string][]string `json:"keys"` // IDs of the keys that the replica had, by kind
	Reason    string              `json:"why,omitempty"`
}

// readRemovedMembers reads the list of removed members and its revision, which is 0 if there is no
// list.
func readRemovedMembers(ctx context.Context, store Store) (
	rec removedMembersRecord, revision raftstore.Revision, err error,
) {
	revision, err = readRecord(ctx, store, datadir.RemovedMembersKey, "list of removed members", &rec)
	if err == nil && revision == 0 {
		rec.Version = removedRecordVersion
	}
	return rec, revision, err
}

// recordedRemoval is a removal that recordRemoval has added to the list of removed members. If the
// removal then fails, undoRecordedRemoval deletes it from the list.
type recordedRemoval struct {
	entry   removedMember
	dropped []removedMember // entries that the new entry replaced, or that exceeded maxRemovedMembers
}

// recordRemoval adds an entry to the stored list of removed members, before the replica called name
// is removed. The entry contains the IDs of keys, which the replica has. recordRemoval deletes
// entries without a key that is still valid. The new entry replaces an entry with the same name and
// the same keys. recordRemoval returns the new entry and the replaced entries, for
// undoRecordedRemoval. If a later release has written the list, it changes nothing and returns nil.
func (r *Membership) recordRemoval(ctx context.Context, name, reason string, keys []api.ClusterKeyHeld, now time.Time) (
	*recordedRemoval, error,
) {
	for {
		rec, at, err := readRemovedMembers(ctx, r.store)
		if err != nil || rec.Version > removedRecordVersion {
			return nil, err
		}
		recorded := &recordedRemoval{entry: removedMember{name, now.UnixMilli(), keyIDsByKind(keys),
			api.Truncate(reason, maxRemovalReasonBytes)}}
		rec.Members = slices.DeleteFunc(rec.Members, func(m removedMember) bool {
			return len(validKeyKinds(m, keys)) == 0
		})
		rest := slices.DeleteFunc(slices.Clone(rec.Members), func(m removedMember) bool {
			return m.Name == name && maps.EqualFunc(m.KeyIDs, recorded.entry.KeyIDs, slices.Equal)
		})
		rest = rest[max(0, len(rest)+1-maxRemovedMembers):]
		for _, m := range rec.Members {
			if !slices.ContainsFunc(rest, m.isSameRemoval) {
				recorded.dropped = append(recorded.dropped, m)
			}
		}
		rec.Members = append(rest, recorded.entry)
		if err = commitRecord(ctx, r.store, datadir.RemovedMembersKey, rec, at, 0); !isConflict(err) {
			return recorded, err
		}
	}
}

// isSameRemoval reports whether m and other have the same name and the same time of removal.
func (m removedMember) isSameRemoval(other removedMember) bool {
	return m.Name == other.Name && m.RemovedAt == other.RemovedAt
}

// undoRecordedRemoval deletes the entry that recordRemoval has added, if the store has refused the
// removal with removalErr: the replica then remains a member and keeps its keys. It also restores
// the entries that the new entry replaced. If the removal may have been committed, the entry stays.
func (r *Membership) undoRecordedRemoval(ctx context.Context, recorded *recordedRemoval, removalErr error) {
	if recorded == nil || !errors.Is(removalErr, raftstore.ErrNoMajority) &&
		!errors.Is(removalErr, raftstore.ErrInvalid) {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removalRecordTimeout)
	defer cancel()
	for {
		rec, at, err := readRemovedMembers(ctx, r.store)
		i := slices.IndexFunc(rec.Members, recorded.entry.isSameRemoval)
		if err == nil && (rec.Version > removedRecordVersion || i < 0) {
			return // a later release has written the list, or the entry was dismissed or replaced
		}
		if err == nil {
			rec.Members = append(slices.Delete(rec.Members, i, i+1), recorded.dropped...)
			slices.SortStableFunc(rec.Members, func(a, b removedMember) int {
				return cmp.Compare(a.RemovedAt, b.RemovedAt)
			})
			rec.Members = rec.Members[max(0, len(rec.Members)-maxRemovedMembers):]
			err = commitRecord(ctx, r.store, datadir.RemovedMembersKey, rec, at, 0)
		}
		if isConflict(err) {
			continue
		}
		if err != nil {
			r.config.Log.Error("the removal of a replica was refused, but its entry in the list of removed replicas "+
				"cannot be deleted: "+
				"run 'kctl cluster rotate --clear-removed NAME', unless another replica of this name was removed",
				"name", recorded.entry.Name, "err", err)
		}
		return
	}
}

// DismissRemovedMember deletes the entries with the given name from the list of removed members. If
// the list has no such entry, the error wraps raftstore.ErrUnknownMember.
func (r *Membership) DismissRemovedMember(ctx context.Context, name string) error {
	for {
		rec, at, err := readRemovedMembers(ctx, r.store)
		if err != nil {
			return err
		}
		if rec.Version > removedRecordVersion {
			return errors.New("a later release has written the list of removed replicas: send the request to a " +
				"replica of that release")
		}
		var known []string
		for _, m := range rec.Members {
			known = append(known, m.Name)
		}
		rest := slices.DeleteFunc(slices.Clone(rec.Members), func(m removedMember) bool { return m.Name == name })
		if len(rest) == len(rec.Members) {
			return fmt.Errorf("%w: replica %q is not among the removed replicas [%s]", raftstore.ErrUnknownMember, name,
				strings.Join(known, ", "))
		}
		rec.Members = rest
		if err = commitRecord(ctx, r.store, datadir.RemovedMembersKey, rec, at, 0); !isConflict(err) {
			return err
		}
	}
}

// isConflict reports whether a commit failed because the record was changed after it was read.
func isConflict(err error) bool {
	var conflict *raftstore.ConflictError
	return errors.As(err, &conflict)
}

// keyIDsByKind maps each kind of key to the IDs of its signing key and its trusted keys.
func keyIDsByKind(keys []api.ClusterKeyHeld) map[string][]string {
	out := map[string][]string{}
	for _, k := range keys {
		ids := slices.Clone(k.Believes)
		if k.Signs != "" && !slices.Contains(ids, k.Signs) {
			ids = append(ids, k.Signs)
		}
		if len(ids) > 0 {
			out[k.Kind] = ids
		}
	}
	return out
}

// validKeyKinds returns for which kinds of keys the removed member m had a key that is still valid.
// current are the keys that are in use or trusted.
func validKeyKinds(m removedMember, current []api.ClusterKeyHeld) (kinds []string) {
	for kind, ids := range keyIDsByKind(current) {
		if kind == clusterSecretKind && len(m.KeyIDs[kind]) == 0 {
			// An earlier release has written the entry, without the cluster's secret. Every replica
			// has that secret.
			kinds = append(kinds, kind)
			continue
		}
		if slices.ContainsFunc(ids, func(id string) bool { return slices.Contains(m.KeyIDs[kind], id) }) {
			kinds = append(kinds, kind)
		}
	}
	slices.Sort(kinds)
	return kinds
}

// ListRemovedWithValidKeys returns the removed members that had a key which is still valid. A key
// is valid if a replica in reports, which contains the keys of each member, signs with it or trusts
// it. A removed member stays in the list even if a new member has the same name, because that may
// be another machine. Only DismissRemovedMember removes its entry.
func (r *Membership) ListRemovedWithValidKeys(
	ctx context.Context, reports []api.ClusterKeyHolder,
) (out []api.ClusterRemoved, err error) {
	rec, _, err := readRemovedMembers(ctx, r.store)
	if err != nil {
		return nil, err
	}
	now := []api.ClusterKeyHeld{heldClusterSecret(r.config.Trust)}
	for _, h := range reports {
		now = append(now, h.Keys...)
	}
	for _, m := range rec.Members {
		byKind := map[string]bool{}
		for _, h := range now {
			for _, kind := range validKeyKinds(m, []api.ClusterKeyHeld{h}) {
				byKind[kind] = true
			}
		}
		if len(byKind) == 0 {
			continue
		}
		removed := api.ClusterRemoved{Name: m.Name, At: m.RemovedAt}
		for kind := range byKind {
			removed.Kinds = append(removed.Kinds, kind)
		}
		slices.Sort(removed.Kinds)
		out = append(out, removed)
	}
	return out, nil
}

// RemoveMember removes a member at the request of user, and records which keys the member had. The
// removal is not recorded if a replica removes itself to join again, because it keeps its disk.
func (r *Membership) RemoveMember(ctx context.Context, name, user string) error {
	isMember := slices.ContainsFunc(r.store.Status().Members, func(m raftstore.Member) bool { return m.ID == name })
	var recorded *recordedRemoval
	if isMember && user != clusterhttp.ReplicaUserPrefix+name {
		// The entry is written before the removal. This replica may be the removed member, and
		// could not write the entry afterwards.
		limited, cancel := context.WithTimeout(ctx, removalRecordTimeout)
		var err error
		recorded, err = r.recordRemoval(limited, name, "", heldSharedKeys(r.keys, r.config.Trust), time.Now())
		cancel()
		if err != nil {
			r.config.Log.Error("cannot record the keys of a removed member", "member", name, "err", err)
		}
	}
	err := r.removeFromRaft(ctx, name)
	if err != nil {
		r.undoRecordedRemoval(ctx, recorded, err)
	}
	return err
}

// removeFromRaft removes a member from the raft configuration. A replica that removes itself may
// lose the leader's response, because its connections are closed immediately. In that case
// WatchRemoval receives the outcome from the other replicas, and removeFromRaft returns nil.
func (r *Membership) removeFromRaft(ctx context.Context, name string) error {
	if name != r.config.Dir.Name {
		return r.store.RemoveMember(ctx, name)
	}
	var earlierReason *string // the reason of an earlier removal
	if r.store.Ready() {
		earlierReason = r.removalReason.Load()
	}
	checkRemoved := func() error {
		if why := r.removalReason.Load(); why == nil || why == earlierReason {
			return errors.New("no other replica has reported the removal")
		}
		return nil
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		if wait.For(ctx, removalInterval/20, checkRemoved) == nil {
			cancel()
		}
	}()
	err := r.store.RemoveMember(ctx, name)
	if err != nil && checkRemoved() == nil {
		return nil
	}
	return err
}
