package keyrotation

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

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/keyrotation/rotation"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/internal/backoff"
	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/internal/wakeup"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/disk"
	"keelson.dev/keelson/raftstore/keywatch"
)

const (
	recordKey      = api.StorageRoot + "keelson.dev/key-rotation"
	maxRecordBytes = 64 << 10
)

func decodeRecord(raw []byte) (record rotation.Record, err error) {
	if len(raw) > maxRecordBytes {
		return record, fmt.Errorf("the stored key rotation (%s) has %d bytes, more than %d", recordKey, len(raw),
			maxRecordBytes)
	}
	if err := json.Unmarshal(raw, &record); err != nil {
		return record, fmt.Errorf("the stored key rotation (%s): %w", recordKey, err)
	}
	return record, nil
}

// sealContext returns the associated data with which the new key of a rotation is encrypted. So the
// encrypted key can be decrypted only with the record of its own rotation.
func sealContext(record rotation.Record) string {
	return strings.Join([]string{string(record.Kind), record.ID, record.New}, "\n")
}

// follower watches the record of the rotation, and performs each of its steps on the files of this
// replica.
type follower struct {
	store          raftstore.Store
	folder         string // directory of the CAs and keys in the data directory
	keyFile        string // file of the encryption keys; empty if the operator provides it or nothing is encrypted
	trust          *pki.Trust
	ca             *pki.ClusterCA
	applyClusterCA func() error // applies a change of the cluster CA to connections and files
	tokens         *pki.ServiceTokens
	secrets        *SecretFiles
	rewriteStore   func(context.Context) error // encrypts all files of the store with the current key
	log            *slog.Logger

	filesMutex sync.Mutex // held while related files of folder change
	current    atomic.Pointer[rotation.Record]
	problem    atomic.Pointer[string] // why the current step failed on this replica; nil if it did not fail
	changed    wakeup.Signal          // signaled when current has changed
	users      observedUsers
}

// loadTrust reads this replica's keys and trusted CAs from its data directory. It waits for a step
// that is changing the files, so it never returns a partly applied step.
func (f *follower) loadTrust() (*pki.Trust, error) {
	f.filesMutex.Lock()
	defer f.filesMutex.Unlock()
	return pki.Load(f.folder)
}

// Run performs every step of the rotations on this replica until ctx ends. It repeats a step that
// fails; meanwhile the leader waits for this replica and reports the error.
func (f *follower) Run(ctx context.Context) error {
	pause := backoff.Backoff{Min: 50 * time.Millisecond, Max: 5 * time.Second, Jitter: 0.5}
	for {
		err := keywatch.Run(ctx, f.store, recordKey, func(raw []byte) error {
			return f.applyRecord(ctx, raw)
		}, pause.Reset)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, raftstore.ErrClosed):
			return err
		case err != nil:
			text := err.Error()
			if previous := f.problem.Swap(&text); previous == nil || *previous != text {
				f.log.Error("a step of a key rotation failed and is repeated", "err", err)
			}
		}
		if err := wait.Delay(ctx, pause.Next()); err != nil {
			return err
		}
	}
}

// applyRecord performs the step of the encoded record raw on this replica's disk, and loads the
// changed files.
func (f *follower) applyRecord(ctx context.Context, raw []byte) error {
	record, err := decodeRecord(raw)
	if err != nil {
		return err
	}
	f.current.Store(&record)
	f.changed.Send()
	if record.Version > rotation.Version {
		return fmt.Errorf("a later release started the rotation of %s (version %d of the record, this "+
			"release supports %d)",
			record.Kind, record.Version, rotation.Version)
	}
	err = f.performStep(ctx, record)
	if err == nil {
		err = f.ca.Reload(record.TrustOrder)
	}
	if err == nil && record.Kind == rotation.ClusterCA {
		err = f.applyClusterCA()
	}
	if err != nil {
		return fmt.Errorf("step %s of the rotation of %s: %w", record.Step, record.Kind, err)
	}
	f.problem.Store(nil)
	f.log.Info("key rotation", "kind", record.Kind, "step", record.Step, "new", record.New, "old", record.Old)
	return nil
}

// keySteps are the functions that perform the steps of a rotation of one kind on this replica's
// disk. All of them are idempotent.
type keySteps struct {
	trust, use func(key []byte) error
	serve      func() error // performs the step serve; nil for all kinds but the cluster CA
	drop       func(id string) error
	reload     func() error // loads the changed files into the running replica
}

func (f *follower) stepsOf(kind rotation.Kind) (keySteps, error) {
	onKey := func(change func(dir string, key []byte) error) func([]byte) error {
		return func(key []byte) error { return change(f.folder, key) }
	}
	onID := func(change func(dir, id string) error) func(string) error {
		return func(id string) error { return change(f.folder, id) }
	}
	reloadPeers := func() error {
		_, err := f.secrets.authorities.Reload()
		return err
	}
	switch kind {
	case rotation.ClusterCA:
		return keySteps{trust: onKey(pki.AddTrustedCA), use: onKey(pki.SetSigningCA), drop: onID(pki.RemoveTrustedCA),
			serve:  func() error { return pki.FinishServingCA(f.folder) },
			reload: reloadPeers, // the cluster CA may sign for replicas, too
		}, nil
	case rotation.PeersCA:
		return keySteps{trust: onKey(pki.AddTrustedPeerCA), use: onKey(pki.SetSigningPeerCA),
			drop: onID(pki.RemoveTrustedPeerCA), reload: reloadPeers}, nil
	case rotation.ServiceAccountKey:
		return keySteps{trust: onKey(pki.AddServiceKey), use: onKey(pki.SetSigningServiceKey),
			drop: onID(pki.RemoveServiceKey),
			reload: func() error {
				trust, err := pki.Load(f.folder)
				if err != nil {
					return err
				}
				return f.tokens.ReplaceKeys(trust.ServiceKey, trust.ServiceTrusted...)
			}}, nil
	case rotation.EncryptionKey:
		if f.keyFile == "" {
			return keySteps{}, errors.New(f.explainNoKeyFile())
		}
		return keySteps{
			trust: func(key []byte) error { return disk.AddDecryptionKey(f.keyFile, key) },
			use:   func(key []byte) error { return disk.ActivateKey(f.keyFile, key) },
			drop: func(id string) error {
				return disk.RemoveKey(f.keyFile, id, filepath.Join(f.folder, datadir.FormerKeysFile))
			},
			reload: f.secrets.reloadKeys,
		}, nil
	}
	return keySteps{}, errors.New("this release does not support this kind of key")
}

// performStep performs the step of a record on this replica's disk. It is idempotent: it is called
// again after a restart and after an error.
func (f *follower) performStep(ctx context.Context, record rotation.Record) error {
	steps, err := f.stepsOf(record.Kind)
	if err != nil {
		return err
	}
	if record.Kind == rotation.EncryptionKey && record.Step == rotation.Forget &&
		f.keysOf(record.Kind).Signs == record.New {
		if err := f.rewriteStore(ctx); err != nil {
			return fmt.Errorf("sealing the store with the new key: %w", err)
		}
	}
	f.filesMutex.Lock()
	defer f.filesMutex.Unlock()
	// If a restored backup contains the rotation, its new key may have been abandoned since.
	if signs := f.keysOf(record.Kind).Signs; record.Active() && !record.AppliesTo(signs) {
		return fmt.Errorf("this replica signs with key %s, and the rotation replaces %s by %s: "+
			"if every replica reports this, a restored backup contains the rotation, and it is aborted "+
			"without a change; "+
			"if only this replica does, join it again with 'keelson-controlplane join'", signs, record.Old, record.New)
	}
	changed, err := f.changeFiles(steps, record)
	if err != nil || !changed {
		return err
	}
	return steps.reload()
}

// changeFiles performs the step of record on the files of this replica's keys. changed is false if
// the step does not require a change of the files. The caller holds f.filesMutex.
func (f *follower) changeFiles(steps keySteps, record rotation.Record) (changed bool, err error) {
	hasNew := f.keysOf(record.Kind).Signs == record.New
	missing := fmt.Errorf("this replica does not have key %s: join it again with 'keelson-controlplane join'",
		record.New)
	switch record.Step {
	case rotation.Trust, rotation.Use:
		key, err := f.trust.Unseal(sealContext(record), record.Sealed)
		if err != nil {
			return false, err
		}
		if record.Step == rotation.Trust {
			return true, steps.trust(key)
		}
		return true, steps.use(key)
	case rotation.Serve:
		if steps.serve == nil || !hasNew {
			return false, missing
		}
		return true, steps.serve()
	case rotation.Forget, rotation.Done:
		// A replica that missed the rotation does not have the new key. It keeps its keys until it
		// is joined again. After the rotation, an operator may have replaced the key by hand.
		switch {
		case hasNew:
			return true, steps.drop(record.Old)
		case record.Step == rotation.Done:
			return false, nil
		}
		return false, missing
	case rotation.Aborted:
		if hasNew {
			return false, nil
		}
		return true, steps.drop(record.New)
	}
	return false, nil // at the step wait, nothing changes
}

func (f *follower) explainNoKeyFile() string {
	if file := f.secrets.options.Keys; file != "" {
		return fmt.Sprintf("its encryption keys are in %s, which the operator provides: run 'keelson-controlplane "+
			"keys add %s' and copy the file to every replica", file, file)
	}
	return "its store is not encrypted"
}

// keysOf returns the IDs of this replica's keys of the given kind. If the current rotation is of
// that kind, the result also contains the error of its step on this replica.
func (f *follower) keysOf(kind rotation.Kind) (held api.ClusterKeyHeld) {
	held.Kind = string(kind)
	switch kind {
	case rotation.ClusterCA:
		held.Signs, held.Serves = pki.CAID(f.ca.SigningCA().Cert), pki.CAID(f.ca.ServingCA().Cert)
		for _, c := range f.ca.TrustedCerts() {
			held.Believes = append(held.Believes, pki.CAID(c))
		}
	case rotation.PeersCA:
		for i, c := range f.secrets.authorities.Authorities() {
			if i == 0 {
				held.Signs = pki.PeerID(c)
			}
			if id := pki.PeerID(c); !slices.Contains(held.Believes, id) { // the signing CA may occur twice
				held.Believes = append(held.Believes, id)
			}
		}
	case rotation.ServiceAccountKey:
		held.Signs, held.Believes = f.tokens.KeyIDs()
	case rotation.EncryptionKey:
		ring := f.secrets.Keyring()
		held.Signs, held.Believes = ring.Current(), ring.IDs()
		if f.keyFile == "" {
			held.Problem = f.explainNoKeyFile()
		}
	}
	if record := f.current.Load(); record.Kind == kind && record.Active() {
		if problem := f.problem.Load(); problem != nil {
			held.Problem = *problem
		}
	}
	return held
}

func (f *follower) allKeys() (all []api.ClusterKeyHeld) {
	for _, kind := range rotation.Kinds() {
		all = append(all, f.keysOf(kind))
	}
	return all
}
