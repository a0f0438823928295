package server

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/controlplane/server/rotation"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/disk"
	"keelson.dev/keelson/raftstore/replica"
)

const (
	keysEvery = 300 * time.Millisecond // how often replicas are asked how far they are
	keysIdle  = 5 * time.Second        // how often the leader looks while only time passes
	// serviceKeyKeep outlives the tokens of pods, of which none lives longer than a day.
	serviceKeyKeep = 25 * time.Hour
	// clusterCAKeep is time to have clients read the CA that read it once.
	clusterCAKeep = 24 * time.Hour
	maxKeep       = 400 * 24 * time.Hour
	maxKeysAnswer = 4 << 20 // of what a replica says of its keys
)

// keepKeys takes the steps of an exchange, for as long as this replica leads under the fence.
func (r *Replica) keepKeys(ctx context.Context, fence raftstore.Fence) error {
	said := ""
	for {
		var idle <-chan time.Time
		if rec := r.keys.seen.Load(); rec.Active() {
			waiting, err := r.stepKeys(ctx, fence)
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if err != nil {
				return fmt.Errorf("exchange of %s: %w", rec.Kind, err)
			}
			if why := strings.Join(waiting, "; "); why != said {
				said = why
				r.log.Info("the exchange of a key waits", "kind", rec.Kind, "step", rec.Step, "for", why)
			}
			pause := keysEvery
			if rec.Step == rotation.Wait && len(waiting) > 0 {
				pause = keysIdle
			}
			idle = time.After(pause)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-r.keys.changed:
		case <-idle:
		}
	}
}

// stepKeys takes the next step when all are ready for it. While it looks nobody becomes a member.
func (r *Replica) stepKeys(ctx context.Context, fence raftstore.Fence) (waiting []string, err error) {
	err = r.store.HoldMembers(ctx, func(ctx context.Context, _ []replica.MemberLevel) error {
		rec, at, err := r.storedRotation(ctx, raftstore.ReadOptions{})
		if err != nil || !rec.Active() || rec.Version > rotation.Version {
			return err
		}
		all := r.askKeys(ctx)
		rec, noted := noteUsers(rec, all)
		users := r.usersOfFormer(rec)
		if rec.Step == rotation.Wait && len(users) > 0 && (rec.Force || time.Now().UnixMilli() >= rec.Until) {
			if err := r.signSecretsAnew(ctx, rec, uint64(fence)); err != nil {
				return err
			}
		}
		see := rotation.Seen{Members: membersOf(rec.Kind, all), Users: users}
		var next rotation.Record
		if next, waiting, err = r.judge(ctx, rec, see, all); err != nil || next.Step == rec.Step && !noted {
			return err
		}
		if next.Step == rotation.Aborted {
			r.log.Warn("the exchange of a key is of another time, as a restored backup brings one: it is given up, and no key changes", "kind", rec.Kind, "step", rec.Step, "new", rec.New, "old", rec.Old)
		}
		return r.commitRecord(ctx, keysKey, next, at, fence)
	})
	return waiting, err
}

// judge is rotation.Next with the nodes. Those that this replica has heard of are asked about first: all that there are
// have to be listed only when none of them is in the way.
func (r *Replica) judge(ctx context.Context, rec rotation.Record, see rotation.Seen, all []api.ClusterKeyHolder) (next rotation.Record, waiting []string, err error) {
	if rec.Kind == rotation.ClusterCA {
		see.Nodes = nodesOf(r.cachedNodes(), all)
	}
	if next, waiting = rotation.Next(rec, see, time.Now()); next.Step == rec.Step || rec.Kind != rotation.ClusterCA {
		return next, waiting, nil
	}
	known, err := r.knownNodes(ctx)
	if err != nil {
		return rec, nil, err
	}
	see.Nodes = nodesOf(known, all)
	next, waiting = rotation.Next(rec, see, time.Now())
	return next, waiting, nil
}

// noteUsers is the record with the users that the replicas have seen, and whether it is another one.
func noteUsers(rec rotation.Record, all []api.ClusterKeyHolder) (rotation.Record, bool) {
	seen := map[string]rotation.User{}
	for _, h := range all {
		for serial, u := range h.Users {
			if rec.Step == rotation.Wait && u.Seen >= seen[serial].Seen {
				seen[serial] = rotation.User{Name: u.Name, Ends: u.Ends, Seen: u.Seen}
			}
		}
	}
	return rec.Note(seen)
}

// storedRotation reads the record, and the revision at which it was written; 0 when none exists.
func (r *Replica) storedRotation(ctx context.Context, o raftstore.ReadOptions) (rec rotation.Record, at raftstore.Revision, err error) {
	it, _, err := r.store.Get(ctx, keysKey, o)
	if errors.Is(err, raftstore.ErrNotFound) {
		return rec, 0, nil
	}
	if err != nil {
		return rec, 0, err
	}
	rec, err = decodeRotation(it.Value)
	return rec, it.Modified, err
}

// membersOf is what the replicas have of one kind.
func membersOf(kind rotation.Kind, all []api.ClusterKeyHolder) (out []rotation.Member) {
	for _, h := range all {
		m := rotation.Member{Name: h.Name, Problem: h.Problem}
		i := slices.IndexFunc(h.Keys, func(k api.ClusterKeyHeld) bool { return k.Kind == string(kind) })
		switch {
		case m.Problem != "":
		case i < 0:
			m.Problem = "its release does not know this kind of key"
		default:
			m.Problem, m.Held = h.Keys[i].Problem, rotation.Held{Signs: h.Keys[i].Signs, Believes: h.Keys[i].Believes, Serves: h.Keys[i].Serves}
		}
		out = append(out, m)
	}
	return out
}

// askKeys asks every member which keys it goes by.
func (r *Replica) askKeys(ctx context.Context) []api.ClusterKeyHolder {
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	members := r.store.Status().Members
	out := make([]api.ClusterKeyHolder, len(members))
	var asking sync.WaitGroup
	for i, m := range members {
		if m.ID == r.cfg.Name {
			out[i] = r.holder()
			continue
		}
		asking.Go(func() {
			of, err := r.keysOf(ctx, m.Address)
			if err != nil {
				of = api.ClusterKeyHolder{Problem: "it does not answer: " + reason(err)}
			}
			of.Name = m.ID
			out[i] = of
		})
	}
	asking.Wait()
	slices.SortFunc(out, func(a, b api.ClusterKeyHolder) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

func (r *Replica) keysOf(ctx context.Context, peer string) (of api.ClusterKeyHolder, err error) {
	var out api.ClusterKeys
	if err := r.ownPart(ctx, peer, api.PathClusterKeys, maxKeysAnswer, "its release cannot exchange keys", &out); err != nil {
		return of, err
	}
	if len(out.Replicas) != 1 {
		return of, fmt.Errorf("%s: want one replica, got %d", api.PathClusterKeys, len(out.Replicas))
	}
	return out.Replicas[0], nil
}

// usersOfFormer are, of the service account key, the Secrets whose tokens only the former service account key vouches for. Those tokens have no end.
func (r *Replica) usersOfFormer(rec rotation.Record) (out []string) {
	if rec.Kind == rotation.ClusterCA {
		if rec.Step == rotation.Wait {
			return r.usersOfFormerCA(rec)
		}
		return nil
	}
	for _, s := range r.secretsOfFormer(rec) {
		out = append(out, fmt.Sprintf("Secret %s/%s: it gets a new token in the end, and the one of now is good no more", s.Namespace, s.Name))
	}
	slices.Sort(out)
	return out
}

func (r *Replica) secretsOfFormer(rec rotation.Record) (out []*v1.Secret) {
	if rec.Kind != rotation.ServiceAccountKey || rec.Step != rotation.Wait {
		return nil
	}
	for _, o := range client.Informer[*v1.Secret](r.informers).GetStore().List() {
		s, ok := o.(*v1.Secret)
		if ok && s.Type == v1.SecretTypeServiceAccountToken && pki.KeyIDOf(string(s.Data[v1.ServiceAccountTokenKey])) == rec.Old {
			out = append(out, s)
		}
	}
	return out
}

// signSecretsAnew replaces the tokens in Secrets that the former key has signed.
func (r *Replica) signSecretsAnew(ctx context.Context, rec rotation.Record, fence uint64) error {
	return r.signAnew(ctx, r.secretsOfFormer(rec), fence)
}

func (r *Replica) signAnew(ctx context.Context, secrets []*v1.Secret, fence uint64) error {
	c := r.client.As(api.User{Name: api.UserAPIServer, Groups: []string{api.GroupMasters, api.GroupAuthenticated}}).Fenced(fence)
	var errs []error
	for _, s := range secrets {
		account := &v1.ServiceAccount{}
		account.Namespace, account.Name = s.Namespace, s.Annotations[v1.ServiceAccountNameKey]
		account.UID = types.UID(s.Annotations[v1.ServiceAccountUIDKey])
		text, err := r.secretToken(account, s.Name)
		if err != nil {
			return err
		}
		next := s.DeepCopy()
		next.Data[v1.ServiceAccountTokenKey] = []byte(text)
		if _, err := client.Update(ctx, c, next); err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
			errs = append(errs, fmt.Errorf("writing a new token into Secret %s/%s: %w", s.Namespace, s.Name, err))
		}
	}
	return errors.Join(errs...)
}

// serveKeys answers GET /cluster/keys, and POST with a ClusterRotate; authorization has happened.
func (r *Replica) serveKeys(w http.ResponseWriter, req *http.Request, d *deed) {
	if !only(w, req, http.MethodGet, http.MethodPost) {
		return
	}
	if req.Method == http.MethodPost {
		var q api.ClusterRotate
		if !posted(w, req, &q) {
			return
		}
		d.object, d.more = q.Kind, []any{"abort", q.Abort, "force", q.Force, "keep", q.Keep}
		ctx, cancel := context.WithTimeout(req.Context(), changeTimeout)
		defer cancel()
		if q.Dismiss != "" {
			d.verb, d.object, d.more = "dismiss", q.Dismiss, nil
			if !r.dismiss(ctx, w, q) {
				return
			}
		} else if code, err := r.rotate(ctx, q, api.CallerOf(req.Context()).User.Name); err != nil {
			if code == 0 {
				refuseStore(w, err)
			} else {
				refuse(w, code, err)
			}
			return
		}
	}
	if local, _ := strconv.ParseBool(req.URL.Query().Get("local")); local {
		answer(w, api.ClusterKeys{Replicas: []api.ClusterKeyHolder{r.holder()}})
		return
	}
	out := api.ClusterKeys{Replicas: r.askKeys(req.Context())}
	removed, err := r.exposed(req.Context(), out.Replicas)
	if err != nil {
		refuseStore(w, err)
		return
	}
	out.Removed = removed
	rec, _, err := r.storedRotation(req.Context(), raftstore.ReadOptions{Local: req.Method == http.MethodGet})
	if err != nil {
		refuseStore(w, err)
		return
	}
	if rec.Step != "" {
		out.Rotation = &api.ClusterRotation{Kind: string(rec.Kind), New: rec.New, Old: rec.Old, Step: string(rec.Step), By: rec.By,
			Started: rec.Started, Since: rec.Since, Until: rec.Until, Force: rec.Force}
		noted, _ := noteUsers(rec, out.Replicas)
		see := rotation.Seen{Members: membersOf(rec.Kind, out.Replicas), Users: r.usersOfFormer(noted)}
		if _, out.Waiting, err = r.judge(req.Context(), noted, see, out.Replicas); err != nil {
			refuseStore(w, err)
			return
		}
	}
	for i := range out.Replicas { // these were for the judgement
		out.Replicas[i].Nodes, out.Replicas[i].Users = nil, nil
	}
	answer(w, out)
}

// rotate writes what is asked for into the record. A code says how a refusal is answered; 0 leaves that to the error.
func (r *Replica) rotate(ctx context.Context, q api.ClusterRotate, by string) (code int, err error) {
	for range 5 { // the leader may write a step meanwhile
		if code, err = r.rotateOnce(ctx, q, by); !conflicts(err) {
			break
		}
	}
	return code, err
}

func (r *Replica) rotateOnce(ctx context.Context, q api.ClusterRotate, by string) (code int, err error) {
	now, at, err := r.storedRotation(ctx, raftstore.ReadOptions{})
	if err != nil {
		return 0, err
	}
	var next rotation.Record
	switch {
	case q.Abort && (q.Force || q.Keep != ""):
		return http.StatusBadRequest, errors.New("abort goes with neither force nor keep")
	case q.Abort || q.Kind == "" && q.Force:
		if q.Kind != "" && q.Kind != string(now.Kind) {
			return http.StatusConflict, fmt.Errorf("no exchange of %s is under way", q.Kind)
		}
		if !now.Active() {
			return http.StatusConflict, errors.New("no exchange of a key is under way")
		}
		if q.Force {
			next, next.Force = now, true
		} else if next, err = rotation.Abort(now, time.Now()); err != nil {
			return http.StatusConflict, err
		}
	case q.Force && now.Active() && q.Kind == string(now.Kind):
		next = now
		next.Force = true
	default:
		if next, code, err = r.beginRotation(ctx, q, now, by); err != nil {
			return code, err
		}
	}
	return 0, r.commitRecord(ctx, keysKey, next, at, 0)
}

func (r *Replica) beginRotation(ctx context.Context, q api.ClusterRotate, now rotation.Record, by string) (rec rotation.Record, code int, err error) {
	kind, err := rotation.ParseKind(q.Kind)
	if err != nil {
		return rec, http.StatusBadRequest, err
	}
	rec = rotation.Record{Version: rotation.Version, ID: randomID(), Kind: kind, Step: rotation.Trust, By: by, Force: q.Force}
	began := time.Now()
	rec.Started, rec.Since = began.UnixMilli(), began.UnixMilli()
	if rec.Keep, err = keepFormer(kind, q.Keep); err != nil {
		return rec, http.StatusBadRequest, err
	}
	// From here on no replica can be set back to a release that would go by the former key.
	if err = r.level.allows(ctx, "an exchange of keys", datadir.LevelRotation); errors.Is(err, errLevelLow) {
		return rec, http.StatusConflict, err
	} else if err != nil {
		return rec, 0, err
	}
	rec.Believed = now.Believed
	if kind == rotation.ClusterCA {
		rec.Believed = max(rec.Since, now.Believed+1)
		rec.Since = rec.Believed
	}
	if rec.Old, err = rotation.Begin(now, membersOf(kind, r.askKeys(ctx))); err != nil {
		return rec, http.StatusConflict, err
	}
	var text []byte
	switch kind {
	case rotation.ClusterCA:
		text, rec.New, err = pki.NewClusterKey(r.cluster.Name, began)
	case rotation.PeersCA:
		text, rec.New, err = pki.NewPeerKey(r.cluster.Name, began)
	case rotation.ServiceAccountKey:
		text, rec.New, err = pki.NewServiceKey()
	default:
		rec.New = "rotated-" + began.UTC().Format("20060102-150405") + "-" + rec.ID[:8]
		text, err = disk.NewKeys(rec.New)
	}
	if err == nil {
		rec.Sealed, err = r.trust.Seal(sealContext(rec), text)
	}
	return rec, http.StatusInternalServerError, err
}

// keepFormer is for how long a former key is believed, in seconds.
func keepFormer(kind rotation.Kind, asked string) (int64, error) {
	keep, kept := map[rotation.Kind]time.Duration{rotation.ServiceAccountKey: serviceKeyKeep, rotation.ClusterCA: clusterCAKeep}[kind]
	if !kept {
		if asked != "" {
			return 0, fmt.Errorf("keep: nothing that %s has signed is to be kept", kind)
		}
		return 0, nil
	}
	if asked == "" {
		return int64(keep / time.Second), nil
	}
	d, err := time.ParseDuration(asked)
	if err != nil || d < 0 || d > maxKeep {
		return 0, fmt.Errorf("keep %q: want a duration of 0s to %s, such as 25h", asked, maxKeep)
	}
	return int64(d / time.Second), nil
}

func randomID() string {
	var b [16]byte
	rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}
