package server

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/recovery"
	"keelson.dev/keelson/internal/wait"
)

// To serve a backup, a temporary replica runs with its own directory and a new cluster, which has
// new keys and ports on loopback. So no replica or node of the backup's cluster can join it. It
// runs no controller and no scheduler, and calls no CSI driver, so that the served data stays equal
// to the backup. The directory is removed at exit. If the process is killed, the directory is no
// longer locked, and the next process removes it.

// servedBackup contains the settings of a temporary replica that serves a backup.
type servedBackup struct {
	listeners portListeners
	// called once, when all objects of the backup can be read; the argument contains the kinds that
	// the replica serves
	onServed func([]*api.Kind) error
}

const (
	guestName = "backup"
	guestHost = "127.0.0.1"
	// guestTimeout is how long the temporary replica that serves a backup may take to start.
	guestTimeout = 5 * time.Minute
)

// ServeBackup restores a backup into a temporary directory, and serves its objects through the
// Kubernetes API of a temporary replica until ctx ends. It calls ready when all objects of the
// backup can be read. If ready returns an error, ServeBackup stops and returns it.
func ServeBackup(ctx context.Context, o recovery.ServeOptions, ready func(recovery.ServedBackup) error) (err error) {
	trial, err := recovery.PrepareTrial(o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, trial.Close()) }()
	l, err := listenOnLoopback()
	if err != nil {
		return err
	}
	cfg := Config{Name: guestName, DataDir: filepath.Join(trial.Folder, "data"), Advertise: guestHost,
		Process: ProcessConfig{Log: o.Log, Version: o.Version}}
	served, err := cfg.createGuestCluster(l, trial)
	if err != nil {
		l.closeAll()
		return err
	}
	served.Backup, served.Folder = trial.Backup, trial.Folder
	cfg.servedBackup = &servedBackup{listeners: l, onServed: func(all []*api.Kind) error {
		served.Backup.Kinds = recovery.AddServedKinds(served.Backup.Kinds, all)
		return ready(served)
	}}
	return Run(ctx, cfg)
}

// createGuestCluster creates a new cluster in the data directory of the temporary replica, and
// restores the backup of trial into it. The ports of the cluster are those of the listeners l.
func (c Config) createGuestCluster(l portListeners, trial *recovery.Trial) (out recovery.ServedBackup, err error) {
	port := func(l net.Listener) int { return l.Addr().(*net.TCPAddr).Port }
	cluster := datadir.Cluster{Name: guestName, APIPort: port(l.api), FleetPort: port(l.fleet), PeerPort: port(l.peer)}
	founded, err := Init(c, cluster, InitOptions{})
	if err != nil {
		return out, err
	}
	if err := os.Remove(filepath.Join(c.DataDir, datadir.FounderFile)); err != nil { // no node or replica may join
		return out, err
	}
	if err := trial.Restore(c.Dir()); err != nil {
		return out, err
	}
	return recovery.ServedBackup{API: "https://" + datadir.HostPort(guestHost, cluster.APIPort),
		Kubeconfig: founded.Kubeconfig}, nil
}

// runGuest runs on the temporary replica that serves a backup. It waits until all objects of the
// backup can be read, calls servedBackup.onServed, and returns when ctx ends. On any other replica,
// it only waits for the end of ctx.
func (r *Replica) runGuest(ctx context.Context) error {
	if r.cfg.servedBackup == nil {
		<-ctx.Done()
		return ctx.Err()
	}
	waiting, cancel := context.WithTimeout(ctx, guestTimeout)
	defer cancel()
	for _, ch := range []<-chan struct{}{r.registry.Ready(), r.api.server.CustomKinds()} {
		select {
		case <-ch:
		case <-waiting.Done():
			return fmt.Errorf("serving the backup: %w", waiting.Err())
		}
	}
	if err := wait.For(waiting, 20*time.Millisecond, func() error { return r.checkReady(waiting) }); err != nil {
		return fmt.Errorf("serving the backup: %w", err)
	}
	if err := r.cfg.servedBackup.onServed(r.api.kinds.All()); err != nil {
		return err
	}
	<-ctx.Done()
	return ctx.Err()
}

func listenOnLoopback() (l portListeners, err error) {
	for _, into := range []*net.Listener{&l.api, &l.fleet, &l.peer} {
		if *into, err = net.Listen("tcp", datadir.HostPort(guestHost, 0)); err != nil {
			l.closeAll()
			return l, fmt.Errorf("listening on loopback: %w", err)
		}
	}
	return l, nil
}
