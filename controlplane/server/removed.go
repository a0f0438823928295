package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/raftstore"
)

// A replica that is removed has had every key that the replicas share. Which ones those were is written down, so that it
// can be told which of them are good still. The secret of the cluster always is: whoever goes is named until a person says that
// the disk is wiped.

const (
	removedVersion = 1
	maxRemoved     = 64  // of whom something is told; the oldest go first
	maxRemovedWhy  = 512 // bytes of why one was removed
	// noteTimeout leaves the removal itself most of its time, where nothing can be written.
	noteTimeout = 2 * time.Second
	// clusterSecret is the kind of what is exchanged by nothing but a new cluster.
	clusterSecret = "cluster-secret"
)

// sharedKeys are the kinds that replicas share, the cluster's secret among them.
func (r *Replica) sharedKeys() []api.ClusterKeyHeld { return append(r.keys.all(), r.secretHeld()) }

// secretHeld names the cluster's secret. It is the same at every replica, so nobody is asked for it.
func (r *Replica) secretHeld() api.ClusterKeyHeld {
	return api.ClusterKeyHeld{Kind: clusterSecret, Signs: r.trust.SecretID()}
}

// removedMembers is the record. Later releases may add fields; those of a later version are left alone.
type removedMembers struct {
	Version int             `json:"version"`
	Members []removedMember `json:"members"`
}

type removedMember struct {
	Name string              `json:"name"`
	At   int64               `json:"atUnixMs"`
	Keys map[string][]string `json:"keys"` // ids by kind
	Why  string              `json:"why,omitempty"`
}

func (r *Replica) storedRemoved(ctx context.Context) (rec removedMembers, at raftstore.Revision, err error) {
	at, err = r.storedRecord(ctx, datadir.RemovedMembersKey, "list of removed members", &rec)
	if err == nil && at == 0 {
		rec.Version = removedVersion
	}
	return rec, at, err
}

// removalNote is what noteRemoved has changed, by which that can be taken back.
type removalNote struct {
	gone  removedMember
	after []removedMember // of whom something was told until then
}

// noteRemoved writes down that a replica that is about to be removed has had these keys. Asked for again, it is the last time that counts.
// The note is nil where nothing was written.
func (r *Replica) noteRemoved(ctx context.Context, name, why string, had []api.ClusterKeyHeld, now time.Time) (*removalNote, error) {
	for {
		rec, at, err := r.storedRemoved(ctx)
		if err != nil || rec.Version > removedVersion {
			return nil, err
		}
		note := &removalNote{gone: removedMember{name, now.UnixMilli(), idsByKind(had), api.Clip(why, maxRemovedWhy)}}
		rec.Members = slices.DeleteFunc(rec.Members, func(m removedMember) bool { return len(stillGood(m, had)) == 0 })
		rest := slices.DeleteFunc(slices.Clone(rec.Members), func(m removedMember) bool {
			return m.Name == name && maps.EqualFunc(m.Keys, note.gone.Keys, slices.Equal)
		})
		rest = rest[max(0, len(rest)+1-maxRemoved):]
		for _, m := range rec.Members {
			if !slices.ContainsFunc(rest, m.is) {
				note.after = append(note.after, m)
			}
		}
		rec.Members = append(rest, note.gone)
		if err = r.commitRecord(ctx, datadir.RemovedMembersKey, rec, at, 0); !conflicts(err) {
			return note, err
		}
	}
}

// is reports whether both are of one removal.
func (m removedMember) is(other removedMember) bool { return m.Name == other.Name && m.At == other.At }

// takeBack undoes a note when the removal that it was made for was refused: whoever stays keeps the keys rightly, and what
// was told before is told again. Where the removal may have come to pass the note stands.
func (r *Replica) takeBack(ctx context.Context, note *removalNote, refused error) {
	if note == nil || !errors.Is(refused, raftstore.ErrNoMajority) && !errors.Is(refused, raftstore.ErrInvalid) {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), noteTimeout)
	defer cancel()
	for {
		rec, at, err := r.storedRemoved(ctx)
		i := slices.IndexFunc(rec.Members, note.gone.is)
		if err == nil && (rec.Version > removedVersion || i < 0) {
			return // of a later release, or dismissed meanwhile, or removed by somebody else
		}
		if err == nil {
			rec.Members = append(slices.Delete(rec.Members, i, i+1), note.after...)
			slices.SortStableFunc(rec.Members, func(a, b removedMember) int { return cmp.Compare(a.At, b.At) })
			rec.Members = rec.Members[max(0, len(rec.Members)-maxRemoved):]
			err = r.commitRecord(ctx, datadir.RemovedMembersKey, rec, at, 0)
		}
		if conflicts(err) {
			continue
		}
		if err != nil {
			r.log.Error("a replica stays a member, and 'kctl cluster certs' tells that it was removed: 'kctl cluster rotate --clear-removed NAME' mends that, unless another one of the name was",
				"name", note.gone.Name, "err", err)
		}
		return
	}
}

// dismissRemoved forgets that a replica was removed. ErrUnknownMember where none of the name is known to have been.
func (r *Replica) dismissRemoved(ctx context.Context, name string) error {
	for {
		rec, at, err := r.storedRemoved(ctx)
		if err != nil {
			return err
		}
		if rec.Version > removedVersion {
			return errors.New("the list of removed replicas is of a later release")
		}
		var known []string
		for _, m := range rec.Members {
			known = append(known, m.Name)
		}
		rest := slices.DeleteFunc(slices.Clone(rec.Members), func(m removedMember) bool { return m.Name == name })
		if len(rest) == len(rec.Members) {
			return fmt.Errorf("%w was removed: replica %q is not among [%s]", raftstore.ErrUnknownMember, name, strings.Join(known, ", "))
		}
		rec.Members = rest
		if err = r.commitRecord(ctx, datadir.RemovedMembersKey, rec, at, 0); !conflicts(err) {
			return err
		}
	}
}

// dismiss answers who wants nothing told of a removed replica any more, where that is refused.
func (r *Replica) dismiss(ctx context.Context, w http.ResponseWriter, q api.ClusterRotate) bool {
	if alone := (api.ClusterRotate{Dismiss: q.Dismiss}); q != alone {
		refuse(w, http.StatusBadRequest, errors.New("dismiss stands alone"))
		return false
	}
	if err := r.dismissRemoved(ctx, q.Dismiss); err != nil {
		refuseStore(w, err)
		return false
	}
	return true
}

// conflicts says that somebody else has written meanwhile.
func conflicts(err error) bool {
	var conflict *raftstore.ConflictError
	return errors.As(err, &conflict)
}

func idsByKind(keys []api.ClusterKeyHeld) map[string][]string {
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

// stillGood are the kinds of which a removed replica has had a key that is used or believed.
func stillGood(m removedMember, now []api.ClusterKeyHeld) (kinds []string) {
	for kind, ids := range idsByKind(now) {
		if kind == clusterSecret && len(m.Keys[kind]) == 0 { // a release wrote it down that did not name it: every replica has it
			kinds = append(kinds, kind)
			continue
		}
		if slices.ContainsFunc(ids, func(id string) bool { return slices.Contains(m.Keys[kind], id) }) {
			kinds = append(kinds, kind)
		}
	}
	slices.Sort(kinds)
	return kinds
}

// exposed are the removed replicas whose keys are good for something at any of those that are there. That a member has the
// name of one says nothing of the disk that is gone: a person does (dismissRemoved).
func (r *Replica) exposed(ctx context.Context, all []api.ClusterKeyHolder) (out []api.ClusterRemoved, err error) {
	rec, _, err := r.storedRemoved(ctx)
	if err != nil {
		return nil, err
	}
	now := []api.ClusterKeyHeld{r.secretHeld()}
	for _, h := range all {
		now = append(now, h.Keys...)
	}
	for _, m := range rec.Members {
		byKind := map[string]bool{}
		for _, h := range now {
			for _, kind := range stillGood(m, []api.ClusterKeyHeld{h}) {
				byKind[kind] = true
			}
		}
		if len(byKind) == 0 {
			continue
		}
		gone := api.ClusterRemoved{Name: m.Name, At: m.At}
		for kind := range byKind {
			gone.Kinds = append(gone.Kinds, kind)
		}
		slices.Sort(gone.Kinds)
		out = append(out, gone)
	}
	return out, nil
}
