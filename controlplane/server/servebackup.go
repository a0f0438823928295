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

// A backup is served by a replica of its own: a folder that is made for it, a cluster with new keys, ports on loopback. It
// does none of the leader's work, so that what it serves stays what the backup holds: no controller, no scheduler, no calls
// of drivers, and no replica or node of the cluster that it is of can join it. The folder goes when it ends. One that was
// killed leaves its folder, which the next one removes: the lock on it is gone with the process.

// guest is what makes a replica one that serves a backup.
type guest struct {
	listeners threeListeners
	serves    func([]*api.Kind) error // called once, when all kinds are served
}

const (
	guestName = "backup"
	guestHost = "127.0.0.1"
	// guestPatience is how long a restored store may take to be served.
	guestPatience = 5 * time.Minute
)

// ServeBackup restores a backup into a folder of its own and serves it until ctx ends. ready is called when everything in
// it can be read.
func ServeBackup(ctx context.Context, o recovery.ServeOptions, ready func(recovery.Served) error) (err error) {
	trial, err := recovery.PrepareTrial(o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, trial.Close()) }()
	l, err := listenAnywhere()
	if err != nil {
		return err
	}
	cfg := Config{Name: guestName, DataDir: filepath.Join(trial.Folder, "data"), Advertise: guestHost, Log: o.Log, Version: o.Version}
	served, err := cfg.found(l, trial)
	if err != nil {
		l.close()
		return err
	}
	served.Backup, served.Folder = trial.Backup, trial.Folder
	cfg.guest = &guest{listeners: l, serves: func(all []*api.Kind) error {
		served.Backup.Kinds = recovery.WithServed(served.Backup.Kinds, all)
		return ready(served)
	}}
	return Run(ctx, cfg)
}

// found makes the cluster of a guest on its disk, and restores the backup into it.
func (c Config) found(l threeListeners, trial *recovery.Trial) (out recovery.Served, err error) {
	port := func(l net.Listener) int { return l.Addr().(*net.TCPAddr).Port }
	cluster := datadir.Cluster{Name: guestName, APIPort: port(l.api), FleetPort: port(l.fleet), PeerPort: port(l.peer)}
	founded, err := Init(c, cluster, Founding{})
	if err != nil {
		return out, err
	}
	if err := os.Remove(filepath.Join(c.DataDir, datadir.FounderFile)); err != nil { // nobody joins it
		return out, err
	}
	if err := trial.Restore(c.Dir()); err != nil {
		return out, err
	}
	return recovery.Served{API: "https://" + datadir.HostPort(guestHost, cluster.APIPort), Kubeconfig: founded.Kubeconfig}, nil
}

// beGuest says when everything is served that a backup holds.
func (r *Replica) beGuest(ctx context.Context) error {
	if r.cfg.guest == nil {
		<-ctx.Done()
		return ctx.Err()
	}
	waiting, cancel := context.WithTimeout(ctx, guestPatience)
	defer cancel()
	for _, ch := range []<-chan struct{}{r.registry.Ready(), r.api.CustomKinds()} {
		select {
		case <-ch:
		case <-waiting.Done():
			return fmt.Errorf("serving the backup: %w", waiting.Err())
		}
	}
	if err := wait.For(waiting, 20*time.Millisecond, func() error { return r.ready(waiting) }); err != nil {
		return fmt.Errorf("serving the backup: %w", err)
	}
	if err := r.cfg.guest.serves(r.kindsServed.All()); err != nil {
		return err
	}
	<-ctx.Done()
	return ctx.Err()
}

func listenAnywhere() (l threeListeners, err error) {
	for _, into := range []*net.Listener{&l.api, &l.fleet, &l.peer} {
		if *into, err = net.Listen("tcp", datadir.HostPort(guestHost, 0)); err != nil {
			l.close()
			return l, fmt.Errorf("listening on loopback: %w", err)
		}
	}
	return l, nil
}
