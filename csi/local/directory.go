package local

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"keelson.dev/keelson/internal/mountoption"
	"keelson.dev/keelson/internal/safepath"
	"keelson.dev/keelson/internal/wakeup"
)

// Names and parameters of volumes that are folders. A StorageClass with the parameter "backing:
// directory" requests such volumes.
//
// The volume is the folder ROOT/.folders/ID, and a project quota enforces its size. Creating and
// expanding it takes no time. It cannot be frozen for a snapshot. Its record contains the project
// ID from before the folder is created until after the folder was moved to the trash.
//
// A deleted volume is moved to ROOT/.trash/PROJECT, where PROJECT is the project ID. Its content is
// removed in the background, and then the folder itself. While a folder with a project ID exists in
// .folders or .trash, no other volume gets this ID.
const (
	foldersDir = ".folders"
	trashDir   = ".trash"

	backingParam     = "backing"
	backingImage     = "image"
	backingDirectory = "directory"
)

const (
	// firstProject and lastProject are the first and the last project ID that the driver uses. They
	// are above the IDs that are usual in /etc/projid.
	firstProject, lastProject = 1 << 24, 1<<31 - 1
	// bytesPerInode is the size of a folder divided by its limit of inodes, as by default in ext4.
	// minInodes is the lowest limit of inodes.
	bytesPerInode, minInodes = 16 << 10, 1024
	// removeBatch is the number of directory entries that are removed between two checks for
	// cancellation.
	removeBatch = 512
	// trashRetryDelay is the delay before a failed removal of a deleted folder is tried again.
	trashRetryDelay = time.Minute
)

// folderVolumes manages volumes that are folders with a project quota: their folders, their quotas,
// and the trash with deleted folders.
type folderVolumes struct {
	cfg          *Config
	store        *volumeStore
	quotas       quotaBackend  // sets and reads the quotas of folders
	trashChanged wakeup.Signal // receives a value when the trash is not empty
}

func (f *folderVolumes) directoryPath(id string) string {
	return filepath.Join(f.cfg.Root, foldersDir, id)
}
func (f *folderVolumes) trashPath(project uint32) string {
	return filepath.Join(f.cfg.Root, trashDir, strconv.FormatUint(uint64(project), 10))
}
func inodesOf(size int64) int64 { return max(minInodes, size/bytesPerInode) }

// setSizeLimit sets the project quota of a volume's folder to the size in its record r.
func (f *folderVolumes) setSizeLimit(r volumeRecord) error {
	return f.quotas.setLimit(f.cfg.Root, r.Project, r.Size, inodesOf(r.Size))
}

// usesDirectory reports whether the parameters of a StorageClass request volumes that are folders.
// It returns an error for unknown parameters and values.
func usesDirectory(params map[string]string) (directory bool, err error) {
	for k, v := range params {
		switch {
		case k != backingParam:
			return false, status.Errorf(codes.InvalidArgument,
				"parameter %q of the class is unknown: this driver supports %q with the value %q or %q",
				k, backingParam, backingImage, backingDirectory)
		case v != backingImage && v != backingDirectory:
			return false, status.Errorf(codes.InvalidArgument, "parameter %q of the class is %q: it can be %q or %q", k,
				v, backingImage, backingDirectory)
		}
	}
	return params[backingParam] == backingDirectory, nil
}

// checkDirectoryRequest returns an error if a folder volume does not support the requested
// capabilities or the requested initial content (source).
func checkDirectoryRequest(caps []*csi.VolumeCapability, source *csi.VolumeContentSource) error {
	for _, c := range caps {
		switch {
		case c.GetBlock() != nil:
			return status.Errorf(codes.InvalidArgument,
				"volumes of a class with %s: %s are folders, not block devices: use a class with %s: %s",
				backingParam, backingDirectory, backingParam, backingImage)
		case c.GetMount().GetFsType() != "":
			return status.Errorf(codes.InvalidArgument,
				"volumes of a class with %s: %s have no file system of their own: leave csi.storage.k8s.io/fstype out",
				backingParam, backingDirectory)
		}
		if _, err := bindFlags(c.GetMount().GetMountFlags()); err != nil {
			return status.Error(codes.InvalidArgument, err.Error())
		}
	}
	if source != nil {
		return status.Errorf(codes.InvalidArgument,
			"volumes of a class with %s: %s start empty: use a class with %s: %s for volumes with initial data",
			backingParam, backingDirectory, backingParam, backingImage)
	}
	return nil
}

// errNoCopies returns the error for a request to copy the volume with this ID, which is a folder.
// Folders cannot be copied.
func errNoCopies(id string) error {
	return status.Errorf(codes.FailedPrecondition,
		"volume %s is a folder (its class has %s: %s), which cannot be frozen for a copy: it supports no "+
			"snapshots and no clones; use a class with %s: %s", id, backingParam, backingDirectory,
		backingParam, backingImage)
}

// createDirectoryVolume creates a volume that is a folder with a project quota, unless it exists,
// and returns its size. The caller must hold the lock of the volume.
func (d *Driver) createDirectoryVolume(id string, size int64, want *csi.CapacityRange) (int64, error) {
	made := volumeRecord{Version: recordVersion, Size: size, Backing: backingDirectory}
	return d.createOnce(id, made, want, func(r *volumeRecord) (err error) {
		if err := d.folders.quotas.checkReady(d.cfg.Root); err != nil {
			return status.Errorf(codes.FailedPrecondition, "making volume %s on node %s: %v", id, d.cfg.NodeID, err)
		}
		if err := d.space.checkSpace("volume "+id, size); err != nil {
			return err
		}
		if r.Project, err = d.folders.findFreeProject(id); err == nil {
			err = d.store.writeVolume(id, *r)
		}
		if err != nil {
			return d.space.statusError("making volume "+id, err)
		}
		if err := d.folders.createLimitedDirectory(id, *r); err != nil {
			return d.space.statusError("making volume "+id, errors.Join(err, d.discardVolume(id, *r)))
		}
		return nil
	})
}

// createLimitedDirectory creates the folder of the volume with this ID, and gives the folder the
// project ID in the record r. It sets the quota before it creates the folder.
func (f *folderVolumes) createLimitedDirectory(id string, r volumeRecord) error {
	dir := f.directoryPath(id)
	if err := os.MkdirAll(filepath.Dir(dir), 0o700); err != nil {
		return err
	}
	if err := f.setSizeLimit(r); err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	if err := f.quotas.setProject(dir, r.Project); err != nil {
		return err
	}
	return os.Chmod(dir, 0o777) // pods write as any user, whatever the umask is
}

// findFreeProject returns a project ID for the volume with this ID. No other volume, no deleted
// folder, and no other program on this disk uses the project ID.
func (f *folderVolumes) findFreeProject(id string) (uint32, error) {
	taken := map[uint32]bool{}
	if err := f.store.eachRecord(func(_ string, r volumeRecord) { taken[r.Project] = true }); err != nil {
		return 0, err
	}
	deleted, err := f.trashedProjects()
	if err != nil {
		return 0, err
	}
	for _, p := range deleted {
		taken[p] = true
	}
	p := firstProjectCandidate(f.cfg.Root, id)
	for range len(taken) + 1024 {
		if !taken[p] {
			u, err := f.quotas.usageOf(f.cfg.Root, p)
			if err != nil || u.isUnused() {
				return p, err
			}
		}
		if p++; p > lastProject {
			p = firstProject
		}
	}
	return 0, errors.New("no free project ID was found")
}

// firstProjectCandidate returns the project ID that findFreeProject tries first. It is a hash of
// the driver's root folder and the volume ID. Several drivers on one disk thus try different
// project IDs.
func firstProjectCandidate(root, id string) uint32 {
	h := fnv.New32a()
	fmt.Fprintf(h, "%s\x00%s", root, id)
	return firstProject + h.Sum32()%(lastProject-firstProject+1)
}

// discardVolume deletes the data of the volume with this ID and the record r, and then the record.
// The volume must not be in use. It may be a folder or a backing file, and its creation may be
// unfinished.
func (d *Driver) discardVolume(id string, r volumeRecord) error {
	if r.Backing != backingDirectory {
		return d.store.removeImage(id)
	}
	if err := os.MkdirAll(filepath.Join(d.cfg.Root, trashDir), 0o700); err != nil {
		return err
	}
	err := os.Rename(d.folders.directoryPath(id), d.folders.trashPath(r.Project))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err != nil { // the folder was not created yet, or is in the trash already
		d.folders.clearQuota(r.Project)
	}
	if err := os.Remove(d.store.recordFile(id)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	d.folders.trashChanged.Send()
	return nil
}

// clearQuota removes the quota limit of a project ID after its folder was deleted. An error is only
// logged: a limit without files has no effect, and findFreeProject does not return the ID again.
func (f *folderVolumes) clearQuota(project uint32) {
	if err := f.quotas.setLimit(f.cfg.Root, project, 0, 0); err != nil {
		f.cfg.Log.Warn("an unused quota remains", "project", project, "err", err)
	}
}

// trashedProjects returns the project IDs of the deleted folders in ROOT/.trash.
func (f *folderVolumes) trashedProjects() (out []uint32, err error) {
	entries, err := os.ReadDir(filepath.Join(f.cfg.Root, trashDir))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	for _, e := range entries {
		if p, err := strconv.ParseUint(e.Name(), 10, 32); err == nil {
			out = append(out, uint32(p))
		}
	}
	return out, err
}

// emptyTrash removes the deleted folders in ROOT/.trash, removeBatch entries at a time, until the
// trash is empty or ctx is canceled.
func (f *folderVolumes) emptyTrash(ctx context.Context) error {
	all, err := f.trashedProjects()
	if err != nil {
		return err
	}
	var errs []error
	for _, p := range all {
		if err := f.removeTrashed(ctx, p); err != nil {
			errs = append(errs, fmt.Errorf("removing the deleted volume with project ID %d: %w", p, err))
		}
	}
	return errors.Join(errs...)
}

func (f *folderVolumes) removeTrashed(ctx context.Context, project uint32) error {
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		left, err := safepath.RemoveContents(f.trashPath(project), removeBatch)
		if err != nil {
			return err
		}
		if !left {
			break
		}
	}
	f.clearQuota(project)
	if err := os.Remove(f.trashPath(project)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// runTrashCollector calls emptyTrash at its start, after each deletion of a folder, and after an
// error, until ctx is canceled.
func (f *folderVolumes) runTrashCollector(ctx context.Context) {
	for {
		var again <-chan time.Time
		if err := f.emptyTrash(ctx); err != nil && ctx.Err() == nil {
			f.cfg.Log.Error("emptying the trash", "err", err)
			again = time.After(trashRetryDelay)
		}
		select {
		case <-ctx.Done():
			return
		case <-f.trashChanged:
		case <-again:
		}
	}
}

// stageDirectory bind-mounts the folder of the volume with this ID at path, with the mount options
// flags. Before that, it verifies the folder's project ID and sets its quota.
func (f *folderVolumes) stageDirectory(id string, r volumeRecord, path string, flags []string) error {
	dir := f.directoryPath(id)
	project, err := f.quotas.projectIDOf(dir)
	if errors.Is(err, os.ErrNotExist) {
		return status.Errorf(codes.NotFound, "volume %s has no data on node %s: its folder is missing and is not "+
			"replaced by an empty one", id, f.cfg.NodeID)
	}
	if err == nil {
		err = f.quotas.checkReady(f.cfg.Root)
	}
	if err == nil && project != r.Project {
		err = fmt.Errorf("%s does not have the project ID of its quota: run chattr -R +P -p %d on it", dir, r.Project)
	}
	if err == nil {
		err = f.setSizeLimit(r)
	}
	if err != nil {
		return status.Errorf(codes.FailedPrecondition, "staging volume %s on node %s: %v", id, f.cfg.NodeID, err)
	}
	bits, err := bindFlags(flags)
	if err != nil {
		return status.Errorf(codes.InvalidArgument, "volume %s: %v", id, err)
	}
	if err := bindMount(dir, path, bits); err != nil {
		return status.Errorf(codes.Internal, "staging volume %s: %v", id, err)
	}
	return nil
}

// bindFlags converts mount options to the flags of a bind mount of a folder. It returns an error
// for options that such a mount does not support, such as options of a file system.
func bindFlags(flags []string) (uintptr, error) {
	const ofMounts = unix.MS_RDONLY | unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC | unix.MS_NOATIME |
		unix.MS_NODIRATIME | unix.MS_RELATIME
	bits, rest := mountoption.SplitFlags(flags)
	if bits&^ofMounts != 0 || len(rest) > 0 {
		return 0,
			fmt.Errorf("mount options %q: a folder (%s: %s) supports ro, nosuid, nodev, noexec, noatime, "+
				"nodiratime and relatime",
				strings.Join(flags, ","), backingParam, backingDirectory)
	}
	return bits, nil
}

// directoryStats returns the usage and the limits of the folder of the volume with this ID,
// according to its project quota. The folder must be mounted at path.
func (f *folderVolumes) directoryStats(id string, r volumeRecord, path string) (
	*csi.NodeGetVolumeStatsResponse, error,
) {
	if ok, err := isSameFolder(f.directoryPath(id), path); err != nil || !ok {
		return nil, status.Errorf(codes.NotFound, "volume %s is not at %s (%v)", id, path, err)
	}
	u, err := f.quotas.usageOf(f.cfg.Root, r.Project)
	if err != nil {
		return nil, status.Errorf(codes.Internal, "volume %s: %v", id, err)
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(f.cfg.Root, &fs); err != nil {
		return nil, status.Errorf(codes.Internal, "free space of %s: %v", f.cfg.Root, err)
	}
	left := func(total, used, disk int64) int64 { return max(0, min(total-used, disk)) }
	return &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{
		{Unit: csi.VolumeUsage_BYTES, Total: r.Size, Used: u.bytes,
			Available: left(r.Size, u.bytes, int64(fs.Bavail)*fs.Bsize)},
		{Unit: csi.VolumeUsage_INODES, Total: inodesOf(r.Size), Used: u.inodes,
			Available: left(inodesOf(r.Size), u.inodes, int64(fs.Ffree))}}}, nil
}
