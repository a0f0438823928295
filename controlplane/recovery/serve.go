package recovery

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/internal/diskheadroom"
)

// ServeOptions say which backup is served and where.
type ServeOptions struct {
	Path    string               // of the backup
	WorkDir string               // in which the folder is made
	DataDir string               // of this machine's replica, whose disk is not to be filled; "" = none
	Store   datadir.StoreOptions // of it Keys: a key file, and Identity an age identity, that open the backup
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

// Trial is a backup in a folder of its own, for a replica that serves it. The folder is locked until Close.
type Trial struct {
	Backup api.ClusterBackup
	Folder string // made below WorkDir

	options ServeOptions
	release func()
}

// PrepareTrial removes what killed processes have left in WorkDir, reads the whole backup and makes the folder for it. It
// refuses where the disk has not enough space for the restored store.
func PrepareTrial(o ServeOptions) (*Trial, error) {
	if _, err := SweepServed(o.WorkDir, o.Path); err != nil {
		return nil, fmt.Errorf("removing what was left in %s: %w", o.WorkDir, err)
	}
	info, err := InspectBackup(o.Store, o.Path)
	if err != nil {
		return nil, err
	}
	// A restored store takes what it holds, and as much again for its snapshot of that.
	if err := (diskheadroom.Target{Dir: o.WorkDir, ProtectedPath: o.DataDir}).CheckFree(2 * info.Bytes); err != nil {
		return nil, fmt.Errorf("--work-dir: %w", err)
	}
	dir, release, err := guestFolder(o.WorkDir)
	if err != nil {
		return nil, err
	}
	return &Trial{Backup: info, Folder: dir, options: o, release: release}, nil
}

// Restore restores the backup as it is, join tokens included, into the data directory of a new cluster.
func (t *Trial) Restore(d datadir.Dir) error {
	restore := RestoreOptions{AnyCluster: true, asItIs: true, BackupKeys: t.options.Store.Keys, Identity: t.options.Store.Identity}
	_, err := Restore(d, t.options.Path, restore)
	return err
}

// Close removes the folder, and then its lock: nobody may take the folder for one that is in use, nor sweep it halfway.
func (t *Trial) Close() error {
	err := os.RemoveAll(t.Folder)
	t.release()
	return err
}

// WithServed adds to what a backup holds in which version each resource is to be read, and the resources of which it holds
// nothing. That is the version in which the objects are stored, where it is served: nothing is converted then.
func WithServed(of []api.ClusterBackupKind, all []*api.Kind) []api.ClusterBackupKind {
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
