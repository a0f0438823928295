package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/controlplane/server/rotation"
	"keelson.dev/keelson/internal/backoff"
	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/disk"
)

// The exchange of a key that all replicas share is a record in the store (package rotation). Every replica follows it and
// does on its own disk what the step asks for; the leader asks all of them how far they are and takes the next step.
const (
	keysKey    = api.StorageRoot + "keelson.dev/key-rotation"
	maxKeysDoc = 64 << 10 // of the stored record
)

func decodeRotation(raw []byte) (rec rotation.Record, err error) {
	if len(raw) > maxKeysDoc {
		return rec, fmt.Errorf("the stored exchange of keys (%s): a record of %d bytes", keysKey, len(raw))
	}
	if err := json.Unmarshal(raw, &rec); err != nil {
		return rec, fmt.Errorf("the stored exchange of keys (%s): %w", keysKey, err)
	}
	return rec, nil
}

// sealContext binds a sealed key to what it is for.
func sealContext(rec rotation.Record) string {
	return strings.Join([]string{string(rec.Kind), rec.ID, rec.New}, "\n")
}

// keys follows the exchange of keys on one replica.
type keys struct {
	store   raftstore.Store
	folder  string // of the trust
	keyFile string // of the store, when it is the cluster's own; "" when the operator keeps it, or none exists
	trust   *pki.Trust
	ca      *pki.ClusterCA
	renew   func() error // has what this replica holds open or writes down go by the CA of now
	tokens  *pki.ServiceTokens
	secrets *secrets
	rewrite func(context.Context) error // leaves nothing on the disk that was sealed before the key of now
	log     *slog.Logger

	disk    sync.Mutex // held while files of the folder change that belong together
	seen    atomic.Pointer[rotation.Record]
	problem atomic.Pointer[string] // why the record of seen is not taken in
	changed chan struct{}          // buffered: seen has changed
	users   sighted
}

func (r *Replica) wireKeys() {
	r.keys = &keys{
		store: r.store, folder: filepath.Join(r.cfg.DataDir, datadir.PKIFolder), trust: r.trust, ca: r.ca, renew: r.renewByCA, tokens: r.tokens, secrets: r.secrets,
		rewrite: r.store.Rewrite, log: r.log.With("part", "keys"), changed: make(chan struct{}, 1),
	}
	if own := datadir.KeyFile(r.cfg.DataDir); r.cfg.Store.Keys == own {
		r.keys.keyFile = own
	}
	r.keys.seen.Store(&rotation.Record{})
}

// load reads the trust between two steps.
func (k *keys) load() (*pki.Trust, error) {
	k.disk.Lock()
	defer k.disk.Unlock()
	return pki.Load(k.folder)
}

// Run takes in every step until ctx ends. What fails is tried again: the leader waits for it, and names it.
func (k *keys) Run(ctx context.Context) error {
	pause := backoff.Backoff{Min: 50 * time.Millisecond, Max: 5 * time.Second, Jitter: 0.5}
	for {
		err := k.follow(ctx, pause.Reset)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, raftstore.ErrClosed):
			return err
		case err != nil:
			text := err.Error()
			if was := k.problem.Swap(&text); was == nil || *was != text {
				k.log.Error("a step of the exchange of a key fails and is tried again", "err", err)
			}
		}
		if err := wait.Delay(ctx, pause.Next()); err != nil {
			return err
		}
	}
}

func (k *keys) follow(ctx context.Context, well func()) error {
	w, err := k.store.Watch(ctx, keysKey, 0)
	if err != nil {
		return err
	}
	defer w.Stop()
	it, _, err := k.store.Get(ctx, keysKey, raftstore.ReadOptions{Local: true})
	if err == nil {
		err = k.take(ctx, it.Value)
	} else if errors.Is(err, raftstore.ErrNotFound) {
		err = nil
	}
	if err != nil {
		return err
	}
	well()
	for batch := range w.C() {
		for _, ev := range batch.Events {
			if ev.Kind != raftstore.EventPut || ev.Item.Key != keysKey {
				continue
			}
			if err := k.take(ctx, ev.Item.Value); err != nil {
				return err
			}
		}
	}
	return w.Err()
}

// take does what a record asks for on this replica's disk, and has what runs go by it.
func (k *keys) take(ctx context.Context, raw []byte) error {
	rec, err := decodeRotation(raw)
	if err != nil {
		return err
	}
	k.seen.Store(&rec)
	select {
	case k.changed <- struct{}{}:
	default:
	}
	if rec.Version > rotation.Version {
		return fmt.Errorf("the exchange of %s was begun by a later release (version %d of its record, this one knows %d)", rec.Kind, rec.Version, rotation.Version)
	}
	err = k.perform(ctx, rec)
	if err == nil {
		err = k.ca.Reload(rec.Believed)
	}
	if err == nil && rec.Kind == rotation.ClusterCA {
		err = k.renew()
	}
	if err != nil {
		return fmt.Errorf("step %s of the exchange of %s: %w", rec.Step, rec.Kind, err)
	}
	k.problem.Store(nil)
	k.log.Info("exchange of a key", "kind", rec.Kind, "step", rec.Step, "new", rec.New, "old", rec.Old)
	return nil
}

// exchange is how one kind of key is exchanged on this replica's disk, and taken over from there.
type exchange struct {
	believe, use func(text []byte) error
	serve        func() error // nil but of the cluster's CA
	drop         func(id string) error
	reload       func() error
}

func (k *keys) exchangeOf(kind rotation.Kind) (exchange, error) {
	with := func(do func(dir string, text []byte) error) func([]byte) error {
		return func(text []byte) error { return do(k.folder, text) }
	}
	drop := func(do func(dir, id string) error) func(string) error {
		return func(id string) error { return do(k.folder, id) }
	}
	switch kind {
	case rotation.ClusterCA:
		return exchange{believe: with(pki.BelieveCA), use: with(pki.SignCA), drop: drop(pki.DropCA),
			serve: func() error { return pki.ServeCA(k.folder) },
			reload: func() error { // the authority of the replicas may have been this one
				_, err := k.secrets.authorities.Reload()
				return err
			}}, nil
	case rotation.PeersCA:
		return exchange{believe: with(pki.BelievePeer), use: with(pki.SignPeer), drop: drop(pki.DropPeer), reload: func() error {
			_, err := k.secrets.authorities.Reload()
			return err
		}}, nil
	case rotation.ServiceAccountKey:
		return exchange{believe: with(pki.BelieveServiceKey), use: with(pki.SignServiceKey), drop: drop(pki.DropServiceKey), reload: func() error {
			t, err := pki.Load(k.folder)
			if err != nil {
				return err
			}
			return k.tokens.Exchange(t.ServiceKey, t.ServiceTrusted...)
		}}, nil
	case rotation.EncryptionKey:
		if k.keyFile == "" {
			return exchange{}, errors.New(k.noKeyFile())
		}
		return exchange{
			believe: func(text []byte) error { return disk.BelieveKey(k.keyFile, text) },
			use:     func(text []byte) error { return disk.UseKey(k.keyFile, text) },
			drop: func(id string) error {
				return disk.DropKey(k.keyFile, id, filepath.Join(k.folder, datadir.FormerKeysFile))
			},
			reload: k.secrets.takeKeys,
		}, nil
	}
	return exchange{}, errors.New("this release does not know this kind of key")
}

// perform is done again after a restart, and whenever it failed.
func (k *keys) perform(ctx context.Context, rec rotation.Record) error {
	e, err := k.exchangeOf(rec.Kind)
	if err != nil {
		return err
	}
	if rec.Kind == rotation.EncryptionKey && rec.Step == rotation.Forget && k.held(rec.Kind).Signs == rec.New {
		if err := k.rewrite(ctx); err != nil {
			return fmt.Errorf("writing anew what was sealed under the former key: %w", err)
		}
	}
	k.disk.Lock()
	defer k.disk.Unlock()
	if signs := k.held(rec.Kind).Signs; rec.Active() && !rec.Concerns(signs) { // the new key of then may be one that was given up since
		return fmt.Errorf("this replica signs with key %s, and the exchange is one of %s for %s: where every replica does, a backup has brought it, and it is given up without a change; "+
			"where this one alone does, 'keelson-controlplane join' it anew", signs, rec.Old, rec.New)
	}
	switch rec.Step {
	case rotation.Trust, rotation.Use:
		text, err := k.trust.Unseal(sealContext(rec), rec.Sealed)
		if err != nil {
			return err
		}
		if rec.Step == rotation.Trust {
			err = e.believe(text)
		} else {
			err = e.use(text)
		}
		if err != nil {
			return err
		}
	case rotation.Serve:
		if e.serve == nil || k.held(rec.Kind).Signs != rec.New {
			return fmt.Errorf("this replica has not got key %s: 'keelson-controlplane join' it anew", rec.New)
		}
		if err := e.serve(); err != nil {
			return err
		}
	case rotation.Forget, rotation.Done:
		// A replica that was left out does not have the new key: it keeps what it has until somebody joins it anew.
		if held := k.held(rec.Kind); held.Signs != rec.New {
			if rec.Step == rotation.Done { // perhaps it was exchanged again by hand
				return nil
			}
			return fmt.Errorf("this replica has not got key %s: 'keelson-controlplane join' it anew", rec.New)
		}
		if err := e.drop(rec.Old); err != nil {
			return err
		}
	case rotation.Aborted:
		if k.held(rec.Kind).Signs == rec.New {
			return nil
		}
		if err := e.drop(rec.New); err != nil {
			return err
		}
	default: // wait: nothing changes
		return nil
	}
	return e.reload()
}

func (k *keys) noKeyFile() string {
	if f := k.secrets.options.Keys; f != "" {
		return fmt.Sprintf("its encryption keys are in %s, which the operator keeps: 'keelson-controlplane keys add %s' and a copy for every replica", f, f)
	}
	return "its store is not encrypted"
}

// held are the keys of a kind by which this replica goes.
func (k *keys) held(kind rotation.Kind) (out api.ClusterKeyHeld) {
	out.Kind = string(kind)
	switch kind {
	case rotation.ClusterCA:
		out.Signs, out.Serves = pki.CAID(k.ca.Signs().Cert), pki.CAID(k.ca.Serves().Cert)
		for _, c := range k.ca.Believed() {
			out.Believes = append(out.Believes, pki.CAID(c))
		}
	case rotation.PeersCA:
		for i, c := range k.secrets.authorities.Authorities() {
			if i == 0 {
				out.Signs = pki.PeerID(c)
			}
			if id := pki.PeerID(c); !slices.Contains(out.Believes, id) { // the one that signs may be in the list of the others
				out.Believes = append(out.Believes, id)
			}
		}
	case rotation.ServiceAccountKey:
		out.Signs, out.Believes = k.tokens.KeyIDs()
	case rotation.EncryptionKey:
		ring := k.secrets.ring()
		out.Signs, out.Believes = ring.Current(), ring.IDs()
		if k.keyFile == "" {
			out.Problem = k.noKeyFile()
		}
	}
	if rec := k.seen.Load(); rec.Kind == kind && rec.Active() {
		if p := k.problem.Load(); p != nil {
			out.Problem = *p
		}
	}
	return out
}

func (k *keys) all() (out []api.ClusterKeyHeld) {
	for _, kind := range rotation.Kinds() {
		out = append(out, k.held(kind))
	}
	return out
}

// stepPatience is how long a step may take, or the step wait longer than it was meant to.
const stepPatience = 10 * time.Minute

// rotationAlarms tell of an exchange that does not go on.
func rotationAlarms(rec rotation.Record, now time.Time) []api.ClusterAlarm {
	since := time.UnixMilli(rec.Since)
	if rec.Step == rotation.Wait { // it takes its time
		since = time.UnixMilli(rec.Until)
	}
	if !rec.Active() || now.Sub(since) < stepPatience {
		return nil
	}
	return []api.ClusterAlarm{{Kind: "rotation", Since: since.UnixMilli(),
		Message: fmt.Sprintf("the exchange of %s does not go on at step %s, since %s", rec.Kind, rec.Step, since.UTC().Format(time.RFC3339)),
		Remedy:  "'kctl cluster rotate --status' names what it waits for: start replicas and nodes that are away, or remove those that are gone for good"}}
}

var keyStep = prometheus.NewDesc("keelson_key_rotation_since_timestamp_seconds",
	"Since when the exchange of a key is at its step, in seconds since 1970; absent when none is under way.", []string{"kind", "step"}, nil)

// keyMetrics tells of an exchange that is under way, as this replica knows it.
type keyMetrics struct{ r *Replica }

// Describe implements prometheus.Collector.
func (keyMetrics) Describe(ch chan<- *prometheus.Desc) { ch <- keyStep }

// Collect implements prometheus.Collector.
func (m keyMetrics) Collect(ch chan<- prometheus.Metric) {
	if rec := m.r.keys.seen.Load(); rec.Active() {
		ch <- prometheus.MustNewConstMetric(keyStep, prometheus.GaugeValue, float64(rec.Since)/1000, string(rec.Kind), string(rec.Step))
	}
}
