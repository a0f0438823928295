package server

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/recovery"
	"keelson.dev/keelson/controlplane/recovery/backups"
	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/disk"
)

// paths are the documents and verbs of the control plane itself.
func (r *Replica) paths() map[string]http.Handler {
	out := map[string]http.Handler{}
	for path, serve := range map[string]http.HandlerFunc{
		api.PathClusterStatus:        r.serveStatus,
		api.PathClusterHeartbeats:    r.serveHeartbeats,
		api.PathClusterCertificates:  r.serveCertificates,
		api.PathClusterKeys:          r.recorded("rotate", r.serveKeys),
		api.PathClusterKubeconfig:    r.recorded("renew", r.serveKubeconfig),
		api.PathClusterTokens:        r.recorded("token create", r.serveTokens),
		api.PathClusterRevoke:        r.recorded("revoke", r.serveRevoke),
		api.PathClusterMembers:       r.recorded("member add", r.serveMembers),
		api.PathClusterMembers + "/": r.recorded("member remove", r.serveMember),
		api.PathClusterStepDown:      r.recorded("step-down", r.serveStepDown),
		api.PathClusterCompact:       r.recorded("compact", r.serveCompact),
		api.PathClusterBackup:        r.recorded("backup", r.serveBackup),
		api.PathClusterVerify:        r.serveVerify,
		api.PathClusterSupport:       r.recorded("support", r.serveSupport),
	} {
		out[path] = serve
	}
	return out
}

// changeTimeout bounds a change of the group or of its history.
const changeTimeout = 30 * time.Second

// serveStepDown answers POST /cluster/step-down.
func (r *Replica) serveStepDown(w http.ResponseWriter, req *http.Request, d *deed) {
	var q api.ClusterStepDown
	if !posted(w, req, &q) {
		return
	}
	d.object = q.To
	ctx, cancel := context.WithTimeout(req.Context(), changeTimeout)
	defer cancel()
	from := r.store.Status().Leader
	d.more = []any{"leader", from}
	if q.To != "" && q.To == from {
		refuse(w, http.StatusBadRequest, fmt.Errorf("replica %q leads already", q.To))
		return
	}
	to, err := r.store.StepDown(ctx, q.To)
	if err != nil {
		refuseStore(w, err)
		return
	}
	d.object = to
	answer(w, api.ClusterStepDownResult{From: from, To: to})
}

// serveCompact answers POST /cluster/compact.
func (r *Replica) serveCompact(w http.ResponseWriter, req *http.Request, d *deed) {
	var q api.ClusterCompact
	raw, ok := postedRaw(w, req, &q)
	if !ok {
		return
	}
	ctx, cancel := context.WithTimeout(req.Context(), changeTimeout)
	defer cancel()
	now, err := r.store.Sync(ctx)
	if err != nil {
		refuseStore(w, err)
		return
	}
	upTo := raftstore.Revision(q.Revision)
	d.object = fmt.Sprintf("revision %d", upTo)
	switch {
	case upTo > now:
		refuse(w, http.StatusBadRequest, fmt.Errorf("--revision %d is in the future: the store is at %d", upTo, now))
		return
	case upTo == 0:
		upTo = now
		d.object = fmt.Sprintf("revision %d", upTo)
	}
	if upTo > r.store.Status().Compacted {
		err = r.store.Compact(ctx, upTo)
	}
	if errors.Is(err, raftstore.ErrNotLeader) && req.Header.Get(headerForwarded) == "" {
		r.forward(ctx, w, req, raw)
		return
	}
	if err == nil {
		_, err = r.store.Sync(ctx)
	}
	if err != nil {
		refuseStore(w, err)
		return
	}
	s := r.store.Status()
	answer(w, api.ClusterCompactResult{Compacted: uint64(s.Compacted), HistoryBytes: s.HistoryBytes})
}

// headerForwarded marks a request that one replica has handed to another. It goes no further.
const headerForwarded = "Keelson-Forwarded-By"

// headerRecorded marks a request that is another's, whom the replica that hands it on logs.
const headerRecorded = "Keelson-Recorded-By"

// forward lets the leader answer. The caller has been authorized here; this
// replica vouches for it with its own certificate.
func (r *Replica) forward(ctx context.Context, w http.ResponseWriter, req *http.Request, body []byte) {
	s := r.store.Status()
	for _, m := range s.Members {
		if m.ID != s.Leader || m.ID == r.cfg.Name {
			continue
		}
		resp, err := r.call(ctx, req.Method, m.Address, req.URL.Path, body, headerRecorded, r.cfg.Name)
		if err != nil {
			refuse(w, http.StatusServiceUnavailable, fmt.Errorf("asking the leader %s: %w", m.ID, err))
			return
		}
		defer resp.Body.Close()
		w.Header().Set("Content-Type", resp.Header.Get("Content-Type"))
		w.WriteHeader(resp.StatusCode)
		_, _ = io.Copy(w, io.LimitReader(resp.Body, 1<<20))
		return
	}
	refuseStore(w, raftstore.ErrUnavailable)
}

// call asks the replica whose peer address is given, over its API. Headers are names
// and values in turn.
func (r *Replica) call(ctx context.Context, method, peer, path string, body []byte, headers ...string) (*http.Response, error) {
	host, _, err := net.SplitHostPort(peer)
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, method, "https://"+datadir.HostPort(host, r.cluster.APIPort)+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set(headerForwarded, r.cfg.Name)
	for i := 0; i+1 < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	return r.peers.clients.Load().patient.Do(req)
}

// verifyAgain is after how many seconds a replica that verifies another backup may be asked again.
const verifyAgain = "5"

// verifiable is how many bytes a backup may have that is verified beside all else: what it holds is in memory for a moment.
func (c Config) verifiable() int64 {
	if c.verifyBytes != 0 {
		return c.verifyBytes
	}
	return cmp.Or(c.MemoryLimit, defaultMemory) / 4
}

// defaultMemory is the apiserver's.
const defaultMemory = 2 << 30

// bounded reads so many bytes at most. over says that there were more.
type bounded struct {
	r    io.Reader
	left int64
	over bool
}

var errTooLong = errors.New("it is too long")

// Read implements io.Reader.
func (b *bounded) Read(p []byte) (int, error) {
	n, err := b.r.Read(p[:min(int64(len(p)), b.left+1)])
	if b.left -= int64(n); b.left < 0 {
		b.over = true
		return 0, errTooLong
	}
	return n, err
}

// serveVerify answers POST /cluster/backup/verify with what is in the backup that is sent.
func (r *Replica) serveVerify(w http.ResponseWriter, req *http.Request) {
	if !only(w, req, http.MethodPost) {
		return
	}
	if !r.verifying.TryLock() {
		w.Header().Set("Retry-After", verifyAgain)
		refuse(w, http.StatusTooManyRequests, fmt.Errorf("replica %s is verifying another backup, one at a time: ask again, or another replica", r.cfg.Name))
		return
	}
	defer r.verifying.Unlock()
	most := &bounded{r: req.Body, left: r.cfg.verifiable()}
	body := bufio.NewReader(most)
	if head, _ := body.Peek(64); bytes.HasPrefix(head, []byte("age-encryption.org/")) {
		refuse(w, http.StatusBadRequest, fmt.Errorf("%w: no replica has its identity: verify it with --identity where that and keelson-controlplane are", backups.ErrNeedsIdentity))
		return
	}
	info, v, err := disk.ReadBackup(body, r.secrets.ring())
	if most.over {
		refuse(w, http.StatusRequestEntityTooLarge, fmt.Errorf("the backup has more than %d bytes, which is what replica %s verifies with its --memory-limit: 'keelson-controlplane verify FILE' does it on a machine with room and the key file",
			r.cfg.verifiable(), r.cfg.Name))
		return
	}
	if err != nil {
		refuse(w, http.StatusBadRequest, err)
		return
	}
	answer(w, recovery.DescribeBackup(info, v, recovery.BuiltInKinds()))
}

// serveBackup answers POST /cluster/backup with the state of the store.
func (r *Replica) serveBackup(w http.ResponseWriter, req *http.Request, d *deed) {
	if !only(w, req, http.MethodPost) {
		return
	}
	write := r.store.Backup
	if to := (backups.Recipients{Keys: req.URL.Query()["recipient"]}); to.Any() {
		if err := to.Check(); err != nil {
			refuse(w, http.StatusBadRequest, err)
			return
		}
		write = backups.Seal(to, r.store.ClearBackup)
	}
	h := w.Header()
	h.Set("Content-Type", "application/octet-stream")
	h.Set("Trailer", api.HeaderBackupSum)
	out, sum := &counted{w: w}, sha256.New()
	err := write(req.Context(), io.MultiWriter(out, sum))
	d.more = []any{"bytes", out.n}
	if err != nil {
		d.failure = err.Error()
		if out.n == 0 {
			h.Del("Trailer")
			refuseStore(w, err)
			return
		}
		panic(http.ErrAbortHandler) // half a backup must not look like a whole one
	}
	h.Set(api.HeaderBackupSum, hex.EncodeToString(sum.Sum(nil)))
}

type counted struct {
	w io.Writer
	n int64
}

// Write implements io.Writer.
func (c *counted) Write(p []byte) (int, error) {
	n, err := c.w.Write(p)
	c.n += int64(n)
	return n, err
}

// serveMembers answers GET /cluster/members, and POST from a replica that wants to be one.
func (r *Replica) serveMembers(w http.ResponseWriter, req *http.Request, d *deed) {
	if !only(w, req, http.MethodGet, http.MethodPost) {
		return
	}
	if req.Method == http.MethodGet {
		answer(w, r.clusterStatus(req.Context(), false).Members)
		return
	}
	var q api.ClusterJoin
	if !posted(w, req, &q) {
		return
	}
	d.object, d.more = q.Name, []any{"address", q.Address}
	if q.Name == "" || q.Address == "" {
		refuse(w, http.StatusBadRequest, errors.New("a member has a name and an address: 'keelson-controlplane join' on its machine makes it one"))
		return
	}
	ctx, cancel := context.WithTimeout(req.Context(), changeTimeout)
	defer cancel()
	add := r.store.AddMember
	if q.Standby {
		d.more = append(d.more, "standby", true)
		add = r.store.AddLearner
	}
	if err := add(ctx, q.Name, q.Address); err != nil {
		refuseStore(w, err)
		return
	}
	answer(w, q)
}

// serveMember answers GET /cluster/members/NAME, which tells a replica whether it is a member, and DELETE. The leader refuses what
// would cost the group its majority: then nothing could be written any more,
// not even the removal itself.
func (r *Replica) serveMember(w http.ResponseWriter, req *http.Request, d *deed) {
	name := strings.TrimPrefix(req.URL.Path, api.PathClusterMembers+"/")
	d.object = name
	if !only(w, req, http.MethodDelete, http.MethodGet) {
		return
	}
	ctx, cancel := context.WithTimeout(req.Context(), changeTimeout)
	defer cancel()
	if req.Method == http.MethodGet {
		r.tellMember(ctx, w, name)
		return
	}
	member := slices.ContainsFunc(r.store.Status().Members, func(m raftstore.Member) bool { return m.ID == name })
	var note *removalNote
	if member && api.CallerOf(req.Context()).User.Name != replicaUser+name { // one that leaves to be taken in anew keeps its disk
		// Before it goes: this replica may be the one, and writes nothing any more then.
		limited, cancel := context.WithTimeout(ctx, noteTimeout)
		var err error
		note, err = r.noteRemoved(limited, name, "", r.sharedKeys(), time.Now())
		cancel()
		if err != nil {
			r.log.Error("that a removed member has had the keys is not written down", "member", name, "err", err)
		}
	}
	if err := r.removeMember(ctx, name); err != nil {
		r.takeBack(ctx, note, err)
		refuseStore(w, err)
		return
	}
	answer(w, map[string]string{"removed": name})
}

// removeMember has the group take a replica out. Of this one's own removal the leader's answer may be lost, as whoever is no member
// any more is cut off at once, and cannot ask again: then the others say over their API what became of it.
func (r *Replica) removeMember(ctx context.Context, name string) error {
	if name != r.cfg.Name {
		return r.store.RemoveMember(ctx, name)
	}
	var before *string // of a time when it was none, although it is one now
	if r.store.Ready() {
		before = r.removed.Load()
	}
	gone := func() error {
		if why := r.removed.Load(); why == nil || why == before {
			return errors.New("nobody says that it was removed")
		}
		return nil
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		if wait.For(ctx, removalEvery/20, gone) == nil {
			cancel()
		}
	}()
	err := r.store.RemoveMember(ctx, name)
	if err != nil && gone() == nil {
		return nil
	}
	return err
}

// refusal is the error that another replica answered with.
func refusal(resp *http.Response) error {
	raw, _ := io.ReadAll(io.LimitReader(resp.Body, 4096))
	var s struct{ Message string }
	if json.Unmarshal(raw, &s) == nil && s.Message != "" {
		return fmt.Errorf("%s: %s", resp.Status, s.Message)
	}
	return errors.New(resp.Status)
}
