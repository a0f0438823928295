package keyrotation

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"time"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/clusterhttp"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/keyrotation/rotation"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/internal/retry"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/disk"
)

const (
	// serviceKeyKeep is how long the previous service account key stays trusted by default. It
	// exceeds the maximum lifetime of pods' tokens, which is a day.
	serviceKeyKeep = 25 * time.Hour
	// clusterCAKeep is how long the previous cluster CA stays trusted by default. Clients have this
	// time to read the new CA.
	clusterCAKeep = 24 * time.Hour
	maxKeep       = 400 * 24 * time.Hour
)

// Request starts, forces or aborts a rotation, as rotate requests. A new rotation records user as
// the user who started it. The error of a refused request is a *clusterhttp.RefusedError.
func (r *Rotator) Request(ctx context.Context, rotate api.ClusterRotate, user string) error {
	return retry.OnConflict(retry.DefaultTries, func() (again bool, err error) {
		var conflict *raftstore.ConflictError // the leader may commit a step at the same time
		err = r.applyRequest(ctx, rotate, user)
		return errors.As(err, &conflict), err
	})
}

func (r *Rotator) applyRequest(ctx context.Context, rotate api.ClusterRotate, user string) error {
	record, revision, err := r.readRecord(ctx, raftstore.ReadOptions{})
	if err != nil {
		return err
	}
	next := record
	switch {
	case rotate.Abort && (rotate.Force || rotate.Keep != ""):
		return clusterhttp.Refuse(http.StatusBadRequest, errors.New("abort cannot be combined with force or keep"))
	case rotate.Abort || rotate.Kind == "" && rotate.Force:
		if rotate.Kind != "" && rotate.Kind != string(record.Kind) {
			return clusterhttp.Refuse(http.StatusConflict, fmt.Errorf("no rotation of %s is in progress", rotate.Kind))
		}
		if !record.Active() {
			return clusterhttp.Refuse(http.StatusConflict, errors.New("no key rotation is in progress"))
		}
		if rotate.Force {
			next.Force = true
		} else if next, err = rotation.Abort(record, time.Now()); err != nil {
			return clusterhttp.Refuse(http.StatusConflict, err)
		}
	case rotate.Force && record.Active() && rotate.Kind == string(record.Kind):
		next.Force = true
	default:
		if next, err = r.newRecord(ctx, rotate, record, user); err != nil {
			return err
		}
	}
	return commitRecord(ctx, r.config.Store, next, revision, 0)
}

// newRecord returns the record of a new rotation. It contains a new key, encrypted for the
// replicas.
func (r *Rotator) newRecord(ctx context.Context, rotate api.ClusterRotate, previous rotation.Record, user string) (
	record rotation.Record, err error,
) {
	kind, err := rotation.ParseKind(rotate.Kind)
	if err != nil {
		return record, clusterhttp.Refuse(http.StatusBadRequest, err)
	}
	record = rotation.Record{Version: rotation.Version, ID: randomID(), Kind: kind, Step: rotation.Trust, By: user,
		Force: rotate.Force}
	started := time.Now()
	record.Started, record.Since = started.UnixMilli(), started.UnixMilli()
	if record.Keep, err = parseKeep(kind, rotate.Keep); err != nil {
		return record, clusterhttp.Refuse(http.StatusBadRequest, err)
	}
	// This feature level prevents replicas from returning to a release that would use the previous
	// key.
	if err = r.config.Replica.RequireLevel(ctx, "a key rotation", datadir.LevelRotation); errors.Is(err,
		datadir.ErrLevelTooLow) {
		return record, clusterhttp.Refuse(http.StatusConflict, err)
	} else if err != nil {
		return record, err
	}
	record.TrustOrder = previous.TrustOrder
	if kind == rotation.ClusterCA {
		record.TrustOrder = max(record.Since, previous.TrustOrder+1)
		record.Since = record.TrustOrder
	}
	if record.Old, err = rotation.CheckStart(previous, membersOf(kind, r.collectReports(ctx))); err != nil {
		return record, clusterhttp.Refuse(http.StatusConflict, err)
	}
	var key []byte
	switch kind {
	case rotation.ClusterCA:
		key, record.New, err = pki.NewClusterKey(r.config.Cluster, started)
	case rotation.PeersCA:
		key, record.New, err = pki.NewPeerKey(r.config.Cluster, started)
	case rotation.ServiceAccountKey:
		key, record.New, err = pki.NewServiceKey()
	default:
		record.New = "rotated-" + started.UTC().Format("20060102-150405") + "-" + record.ID[:8]
		key, err = disk.GenerateKeyFile(record.New)
	}
	if err == nil {
		record.Sealed, err = r.config.Trust.Seal(sealContext(record), key)
	}
	return record, err
}

// parseKeep parses text, a duration for which the previous key stays trusted, and returns it in
// seconds. If text is empty, it returns the default of the kind.
func parseKeep(kind rotation.Kind, text string) (int64, error) {
	keep, kept := map[rotation.Kind]time.Duration{rotation.ServiceAccountKey: serviceKeyKeep,
		rotation.ClusterCA: clusterCAKeep}[kind]
	if !kept {
		if text != "" {
			return 0, fmt.Errorf("keep: no signature of %s has to stay valid", kind)
		}
		return 0, nil
	}
	if text == "" {
		return int64(keep / time.Second), nil
	}
	d, err := time.ParseDuration(text)
	if err != nil || d < 0 || d > maxKeep {
		return 0, fmt.Errorf("keep %q: want a duration of 0s to %s, such as 25h", text, maxKeep)
	}
	return int64(d / time.Second), nil
}

func randomID() string {
	var b [16]byte
	rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

// Report returns the keys of all members, and the last rotation with the reasons for which it
// waits. If linearizable, the rotation includes all changes that were committed before the call.
func (r *Rotator) Report(ctx context.Context, linearizable bool) (api.ClusterKeys, error) {
	report := api.ClusterKeys{Replicas: r.collectReports(ctx)}
	record, _, err := r.readRecord(ctx, raftstore.ReadOptions{Local: !linearizable})
	if err != nil || record.Step == "" {
		return report, err
	}
	report.Rotation = &api.ClusterRotation{Kind: string(record.Kind), New: record.New, Old: record.Old,
		Step: string(record.Step), By: record.By,
		Started: record.Started, Since: record.Since, Until: record.Until, Force: record.Force}
	record, _ = addUsers(record, report.Replicas)
	state := rotation.ClusterState{Members: membersOf(record.Kind, report.Replicas),
		Users: r.usersOfPreviousKey(record)}
	_, report.Waiting, err = r.nextRecord(ctx, record, state, report.Replicas)
	return report, err
}
