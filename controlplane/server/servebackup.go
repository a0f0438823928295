package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/internal/diskheadroom"
	"keelson.dev/keelson/internal/wait"
)

// A backup is served by a replica of its own: a folder that is made for it, a cluster with new keys, ports on loopback. It
// does none of the leader's work, so that what it serves stays what the backup holds: no controller, no scheduler, no calls
// of drivers, and no replica or node of the cluster that it is of can join it. The folder goes when it ends. One that was
// killed leaves its folder, which the next one removes: the lock on it is gone with the process.

// ServeOptions say which backup is served and where.
type ServeOptions struct {
	Path    string       // of the backup
	WorkDir string       // in which the folder is made
	DataDir string       // of this machine's replica, whose disk is not to be filled; "" = none
	Store   StoreOptions // of it Keys: a key file, and Identity an age identity, that open the backup
	Log     *slog.Logger
	Version string
}

// Served is a backup that is served.
type Served struct {
	Backup     api.ClusterBackup `json:"backup"`
	API        string            `json:"api"`        // its URL
	Kubeconfig string            `json:"kubeconfig"` // path of an administrator's
	Folder     string            `json:"folder"`     // goes when the replica ends
}

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
func ServeBackup(ctx context.Context, o ServeOptions, ready func(Served) error) (err error) {
	if _, err := SweepServed(o.WorkDir, o.Path); err != nil {
		return fmt.Errorf("removing what was left in %s: %w", o.WorkDir, err)
	}
	info, err := InspectBackup(o.Store, o.Path)
	if err != nil {
		return err
	}
	// A restored store takes what it holds, and as much again for its snapshot of that.
	if err := (diskheadroom.Target{Dir: o.WorkDir, ProtectedPath: o.DataDir}).CheckFree(2 * info.Bytes); err != nil {
		return fmt.Errorf("--work-dir: %w", err)
	}
	dir, release, err := guestFolder(o.WorkDir)
	if err != nil {
		return err
	}
	defer func() { // nobody may take the folder for one that is in use, nor sweep it halfway
		err = errors.Join(err, os.RemoveAll(dir))
		release()
	}()
	l, err := listenAnywhere()
	if err != nil {
		return err
	}
	cfg := Config{Name: guestName, DataDir: filepath.Join(dir, "data"), Advertise: guestHost, Log: o.Log, Version: o.Version}
	served, err := cfg.found(l, o)
	if err != nil {
		l.close()
		return err
	}
	served.Backup, served.Folder = info, dir
	cfg.guest = &guest{listeners: l, serves: func(all []*api.Kind) error {
		served.Backup.Kinds = withServed(served.Backup.Kinds, all)
		return ready(served)
	}}
	return Run(ctx, cfg)
}

// found makes the cluster of a guest on its disk, and restores the backup into it.
func (c Config) found(l threeListeners, o ServeOptions) (out Served, err error) {
	port := func(l net.Listener) int { return l.Addr().(*net.TCPAddr).Port }
	cluster := Cluster{Name: guestName, APIPort: port(l.api), FleetPort: port(l.fleet), PeerPort: port(l.peer)}
	founded, err := Init(c, cluster, Founding{})
	if err != nil {
		return out, err
	}
	if err := os.Remove(filepath.Join(c.DataDir, foundersFile)); err != nil { // nobody joins it
		return out, err
	}
	restore := RestoreOptions{AnyCluster: true, asItIs: true, BackupKeys: o.Store.Keys, Identity: o.Store.Identity}
	if _, err := Restore(c, o.Path, restore); err != nil {
		return out, err
	}
	return Served{API: "https://" + at(guestHost, cluster.APIPort), Kubeconfig: founded.Kubeconfig}, nil
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

// withServed adds to what a backup holds in which version each resource is to be read, and the resources of which it holds
// nothing. That is the version in which the objects are stored, where it is served: nothing is converted then.
func withServed(of []api.ClusterBackupKind, all []*api.Kind) []api.ClusterBackupKind {
	served := map[string]*api.Kind{}
	for _, k := range all {
		if s := k.Storage; s != nil && (served[s.Prefix] == nil || k.GVK == s.Hub.GVK) {
			served[s.Prefix] = k
		}
	}
	for i := range of {
		k := served[of[i].Place]
		if k == nil {
			continue
		}
		of[i].Group, of[i].Resource, of[i].Version, of[i].Hidden = k.GVK.Group, k.Resource, k.GVK.Version, k.Hidden
		delete(served, of[i].Place)
	}
	for place, k := range served {
		of = append(of, api.ClusterBackupKind{Place: place, Group: k.GVK.Group, Resource: k.Resource, Version: k.GVK.Version, Hidden: k.Hidden})
	}
	slices.SortFunc(of, func(a, b api.ClusterBackupKind) int { return cmp.Compare(a.Place, b.Place) })
	return of
}

func listenAnywhere() (l threeListeners, err error) {
	for _, into := range []*net.Listener{&l.api, &l.fleet, &l.peer} {
		if *into, err = net.Listen("tcp", at(guestHost, 0)); err != nil {
			l.close()
			return l, fmt.Errorf("listening on loopback: %w", err)
		}
	}
	return l, nil
}

// guestFolder makes a folder that is locked for as long as this process has it.
func guestFolder(parent string) (dir string, release func(), err error) {
	if dir, err = os.MkdirTemp(parent, api.TrialPrefix); err != nil { // mode 0700: the backup will be in it
		return "", nil, fmt.Errorf("--work-dir: %w", err)
	}
	f, err := os.Open(dir)
	if err == nil {
		if err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
			f.Close()
		}
	}
	if err != nil {
		return "", nil, errors.Join(fmt.Errorf("locking %s: %w", dir, err), os.Remove(dir))
	}
	return dir, func() { f.Close() }, nil
}

// FetchedFile makes a file for a backup that is brought here to be looked at. SweepServed removes it once this process is gone.
func FetchedFile(parent string) (*os.File, error) {
	f, err := os.CreateTemp(parent, api.TrialPrefix) // mode 0600
	if err == nil {
		err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	}
	if err != nil {
		return nil, fmt.Errorf("--work-dir: %w", err)
	}
	return f, nil
}

// SweepServed removes the folders and files of processes that were killed, and says which. Those of other users are let be,
// those that are in use, names that os.MkdirTemp does not give, and the backup that the caller is about; "" = none.
func SweepServed(parent, about string) (removed []string, err error) {
	entries, err := os.ReadDir(parent)
	if err != nil {
		return nil, err
	}
	if about != "" {
		if about, err = filepath.Abs(about); err != nil {
			return nil, err
		}
	}
	for _, e := range entries {
		path := filepath.Join(parent, e.Name())
		if !isTrial(e.Name()) || holds(path, about) {
			continue
		}
		f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_NOFOLLOW, 0)
		if err != nil {
			continue // a link, somebody else's, or just gone
		}
		err = sweepOne(f, path)
		f.Close()
		if err != nil {
			return removed, err
		}
		if _, err := os.Lstat(path); errors.Is(err, os.ErrNotExist) {
			removed = append(removed, path)
		}
	}
	return removed, nil
}

// isTrial says whether a name is one that os.MkdirTemp and os.CreateTemp make of api.TrialPrefix.
func isTrial(name string) bool {
	digits, ours := strings.CutPrefix(name, api.TrialPrefix)
	return ours && digits != "" && strings.Trim(digits, "0123456789") == ""
}

// holds says whether a file lies at a path or below it, whichever links lead there.
func holds(path, file string) bool {
	if file == "" {
		return false
	}
	in, err := os.Lstat(path)
	if err != nil {
		return false
	}
	if real, err := filepath.EvalSymlinks(file); err == nil {
		file = real
	}
	for ; ; file = filepath.Dir(file) {
		if at, err := os.Lstat(file); err == nil && os.SameFile(at, in) {
			return true
		}
		if file == filepath.Dir(file) {
			return false
		}
	}
}

func sweepOne(f *os.File, path string) error {
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if owner, ok := info.Sys().(*syscall.Stat_t); !ok || int(owner.Uid) != os.Geteuid() {
		return nil
	}
	if syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) != nil {
		return nil // it is served
	}
	return os.RemoveAll(path)
}
