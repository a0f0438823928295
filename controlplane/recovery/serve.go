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

// ServeOptions are the options for serving the objects of a backup through the API of a temporary
// replica.
type ServeOptions struct {
	Path    string               // path of the backup
	WorkDir string               // directory in which the temporary directory is created
	DataDir string               // data directory on this machine; its disk must not fill up; may be empty
	Store   datadir.StoreOptions // Keys and Identity decrypt the backup; other fields are not used
	Log     *slog.Logger
	Version string
}

// ServedBackup describes a backup, and the API through which a temporary replica serves its
// objects. The command 'backup serve' prints it.
type ServedBackup struct {
	Backup     api.ClusterBackup `json:"backup"`
	API        string            `json:"api"`        // URL of the API
	Kubeconfig string            `json:"kubeconfig"` // path of the administrator's kubeconfig
	Folder     string            `json:"folder"`     // temporary directory; removed when the replica exits
}

// Trial is a backup that a temporary replica is about to serve through its API, with the temporary
// directory of that replica. The directory is locked until Close is called.
type Trial struct {
	Backup api.ClusterBackup
	Folder string // path of the temporary directory in WorkDir

	options ServeOptions
	release func()
}

// PrepareTrial verifies a backup and creates the temporary directory for the replica that will
// serve it. It first removes the files in WorkDir that killed processes have left. It returns an
// error if the disk has not enough free space for the restored store.
func PrepareTrial(o ServeOptions) (*Trial, error) {
	if _, err := RemoveLeftovers(o.WorkDir, o.Path); err != nil {
		return nil, fmt.Errorf("removing files of previous runs in %s: %w", o.WorkDir, err)
	}
	info, err := InspectBackup(o.Store, o.Path)
	if err != nil {
		return nil, err
	}
	// A restored store needs the size of its contents twice: for the state and for its snapshot.
	if err := (diskheadroom.Target{Dir: o.WorkDir, ProtectedPath: o.DataDir}).CheckFree(2 * info.Bytes); err != nil {
		return nil, fmt.Errorf("--work-dir: %w", err)
	}
	dir, release, err := createTrialFolder(o.WorkDir)
	if err != nil {
		return nil, err
	}
	return &Trial{Backup: info, Folder: dir, options: o, release: release}, nil
}

// Restore restores the backup into d, the data directory of the temporary replica. Unlike the
// function Restore, it restores all objects of the backup unchanged.
func (t *Trial) Restore(d datadir.Dir) error {
	restore := RestoreOptions{AnyCluster: true, unchanged: true, BackupKeys: t.options.Store.Keys,
		Identity: t.options.Store.Identity}
	_, err := Restore(d, t.options.Path, restore)
	return err
}

// Close removes the temporary directory and then releases its lock. In this order, no other process
// removes the directory at the same time.
func (t *Trial) Close() error {
	err := os.RemoveAll(t.Folder)
	t.release()
	return err
}

// AddServedKinds returns contents, the resources in a backup, completed with servedKinds, the kinds
// of the replica that serves the backup. It sets the API version in which to read each resource.
// This is the stored version if the replica serves it, because that version needs no conversion,
// and otherwise another served version. AddServedKinds also adds each served resource of which the
// backup contains no objects.
func AddServedKinds(contents []api.ClusterBackupKind, servedKinds []*api.Kind) []api.ClusterBackupKind {
	byPrefix := map[string]*api.Kind{}
	for _, k := range servedKinds {
		if s := k.Storage; s != nil && (byPrefix[s.Prefix] == nil || k.GVK == s.Hub.GVK) {
			byPrefix[s.Prefix] = k
		}
	}
	for i := range contents {
		k := byPrefix[contents[i].Place]
		if k == nil {
			continue
		}
		contents[i].Group, contents[i].Resource = k.GVK.Group, k.Resource
		contents[i].Version, contents[i].Hidden = k.GVK.Version, k.Serving.Hidden
		delete(byPrefix, contents[i].Place)
	}
	for place, k := range byPrefix {
		contents = append(contents, api.ClusterBackupKind{Place: place, Group: k.GVK.Group, Resource: k.Resource,
			Version: k.GVK.Version, Hidden: k.Serving.Hidden})
	}
	slices.SortFunc(contents, func(a, b api.ClusterBackupKind) int { return cmp.Compare(a.Place, b.Place) })
	return contents
}

// createTrialFolder creates a temporary directory in parent. The directory is locked until release
// is called or the process exits.
func createTrialFolder(parent string) (dir string, release func(), err error) {
	if dir, err = os.MkdirTemp(parent, api.TrialPrefix); err != nil { // mode 0700, because it will contain the backup
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

// CreateFetchedFile creates a temporary file in parent for a backup that is fetched from a bucket.
// RemoveLeftovers removes the file after this process has exited.
func CreateFetchedFile(parent string) (*os.File, error) {
	f, err := os.CreateTemp(parent, api.TrialPrefix) // mode 0600
	if err == nil {
		err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	}
	if err != nil {
		return nil, fmt.Errorf("--work-dir: %w", err)
	}
	return f, nil
}

// RemoveLeftovers removes the temporary directories and files that killed processes have left in
// parent, and returns their paths. It keeps files of other users and files in use. It also keeps
// the backup file backupPath, unless that path is empty.
func RemoveLeftovers(parent, backupPath string) (removed []string, err error) {
	entries, err := os.ReadDir(parent)
	if err != nil {
		return nil, err
	}
	if backupPath != "" {
		if backupPath, err = filepath.Abs(backupPath); err != nil {
			return nil, err
		}
	}
	for _, e := range entries {
		path := filepath.Join(parent, e.Name())
		if !isTrialName(e.Name()) || isBelow(path, backupPath) {
			continue
		}
		f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_NOFOLLOW, 0)
		if err != nil {
			continue // a symbolic link, a file of another user, or already removed
		}
		err = removeUnused(f, path)
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

// isTrialName reports whether name consists of api.TrialPrefix and digits, like the names that
// os.MkdirTemp and os.CreateTemp create.
func isTrialName(name string) bool {
	digits, ours := strings.CutPrefix(name, api.TrialPrefix)
	return ours && digits != "" && strings.Trim(digits, "0123456789") == ""
}

// isBelow reports whether file is the same as path, or is below the directory path. Symbolic links
// are resolved.
func isBelow(path, file string) bool {
	if file == "" {
		return false
	}
	in, err := os.Lstat(path)
	if err != nil {
		return false
	}
	if resolved, err := filepath.EvalSymlinks(file); err == nil {
		file = resolved
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

func removeUnused(f *os.File, path string) error {
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if owner, ok := info.Sys().(*syscall.Stat_t); !ok || int(owner.Uid) != os.Geteuid() {
		return nil
	}
	if syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) != nil {
		return nil // it is in use
	}
	return os.RemoveAll(path)
}
