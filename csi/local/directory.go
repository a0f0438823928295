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
)

// A volume of a class with "backing: directory" is the folder ROOT/.folders/ID, whose size a project quota of the disk holds:
// it is there at once and grows at once, and cannot be held still for a snapshot. Its record names its project id from before
// the folder is made until after it is gone from there. What is deleted is moved to ROOT/.trash/PROJECT, and what is in there
// is removed in the background, the folder itself last: an id that has a folder in one of the two places is no other's.
const (
	foldersDir = ".folders"
	trashDir   = ".trash"

	backingParam     = "backing"
	backingImage     = "image"
	backingDirectory = "directory"
)

const (
	// firstProject and lastProject bound the ids that the driver takes: beyond those that people write into /etc/projid.
	firstProject, lastProject = 1 << 24, 1<<31 - 1
	// bytesPerInode is how many inodes a folder has, as an ext4 file system of its size would; leastInodes at least.
	bytesPerInode, leastInodes = 16 << 10, 1024
	// removedAtOnce is how many names are removed before it is looked whether the driver is to end.
	removedAtOnce = 512
	// emptyAgain is when what could not be removed is tried again.
	emptyAgain = time.Minute
)

func (d *Driver) directory(id string) string { return filepath.Join(d.cfg.Root, foldersDir, id) }
func (d *Driver) trash(project uint32) string {
	return filepath.Join(d.cfg.Root, trashDir, strconv.FormatUint(uint64(project), 10))
}
func inodesOf(size int64) int64 { return max(leastInodes, size/bytesPerInode) }

// holdTo has a volume's folder hold what its record says, and no more.
func (d *Driver) holdTo(r record) error {
	return d.quotas.limit(d.cfg.Root, r.Project, r.Size, inodesOf(r.Size))
}

// backing reads the parameters of a class: whether its volumes are folders.
func backing(params map[string]string) (directory bool, err error) {
	for k, v := range params {
		switch {
		case k != backingParam:
			return false, status.Errorf(codes.InvalidArgument, "parameter %q of the class is not known: this driver knows %q, which is %q or %q",
				k, backingParam, backingImage, backingDirectory)
		case v != backingImage && v != backingDirectory:
			return false, status.Errorf(codes.InvalidArgument, "parameter %q of the class is %q: it can be %q or %q", k, v, backingImage, backingDirectory)
		}
	}
	return params[backingParam] == backingDirectory, nil
}

// fitsDirectory says why a folder is not what is asked for.
func fitsDirectory(caps []*csi.VolumeCapability, source *csi.VolumeContentSource) error {
	for _, c := range caps {
		switch {
		case c.GetBlock() != nil:
			return status.Errorf(codes.InvalidArgument, "volumes of a class with %s: %s are folders, and no block devices: use a class with %s: %s",
				backingParam, backingDirectory, backingParam, backingImage)
		case c.GetMount().GetFsType() != "":
			return status.Errorf(codes.InvalidArgument, "volumes of a class with %s: %s have no file system of their own: leave csi.storage.k8s.io/fstype out",
				backingParam, backingDirectory)
		}
		if _, err := bindFlags(c.GetMount().GetMountFlags()); err != nil {
			return status.Error(codes.InvalidArgument, err.Error())
		}
	}
	if source != nil {
		return status.Errorf(codes.InvalidArgument, "volumes of a class with %s: %s are empty at first: use a class with %s: %s for what is to begin with other data",
			backingParam, backingDirectory, backingParam, backingImage)
	}
	return nil
}

// noCopies is the answer to who wants a snapshot or a clone of a folder.
func noCopies(id string) error {
	return status.Errorf(codes.FailedPrecondition, "volume %s is a folder (its class has %s: %s), which cannot be held still for a copy: there are no "+
		"snapshots and no clones of such; use a class with %s: %s", id, backingParam, backingDirectory, backingParam, backingImage)
}

// makeDirectory makes a folder that a quota holds to a size, unless it is there. The volume is locked.
func (d *Driver) makeDirectory(id string, size int64, want *csi.CapacityRange) (int64, error) {
	made := record{Version: recordVersion, Size: size, Backing: backingDirectory}
	return d.unlessThere(id, made, want, func(r *record) (err error) {
		if err := d.quotas.ready(d.cfg.Root); err != nil {
			return status.Errorf(codes.FailedPrecondition, "making volume %s on node %s: %v", id, d.cfg.NodeID, err)
		}
		if err := d.fits("volume "+id, size); err != nil {
			return err
		}
		if r.Project, err = d.freeProject(id); err == nil {
			err = d.keep(id, *r)
		}
		if err != nil {
			return d.failed("making volume "+id, err)
		}
		if err := d.fillDirectory(id, *r); err != nil {
			return d.failed("making volume "+id, errors.Join(err, d.discard(id, *r)))
		}
		return nil
	})
}

// fillDirectory makes the folder of a record. The limit is there before what it limits.
func (d *Driver) fillDirectory(id string, r record) error {
	dir := d.directory(id)
	if err := os.MkdirAll(filepath.Dir(dir), 0o700); err != nil {
		return err
	}
	if err := d.holdTo(r); err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	if err := d.quotas.bear(dir, r.Project); err != nil {
		return err
	}
	return os.Chmod(dir, 0o777) // pods write as any user, whatever our mask says
}

// freeProject finds an id that nothing bears: none of a volume's, of what is being deleted, of other programs.
func (d *Driver) freeProject(id string) (uint32, error) {
	taken := map[uint32]bool{}
	if err := d.each(func(_ string, r record) { taken[r.Project] = true }); err != nil {
		return 0, err
	}
	deleted, err := d.deleted()
	if err != nil {
		return 0, err
	}
	for _, p := range deleted {
		taken[p] = true
	}
	p := projectOf(d.cfg.Root, id)
	for range len(taken) + 1024 {
		if !taken[p] {
			u, err := d.quotas.used(d.cfg.Root, p)
			if err != nil || u.free() {
				return p, err
			}
		}
		if p++; p > lastProject {
			p = firstProject
		}
	}
	return 0, errors.New("no project id is free near where one was looked for")
}

// projectOf is where the search for an id begins: at different ids for drivers that share a disk, so that none takes what
// another is about to.
func projectOf(root, id string) uint32 {
	h := fnv.New32a()
	fmt.Fprintf(h, "%s\x00%s", root, id)
	return firstProject + h.Sum32()%(lastProject-firstProject+1)
}

// discard takes a volume away that nobody uses, whatever it is and however far it was made, its record last.
func (d *Driver) discard(id string, r record) error {
	if r.Backing != backingDirectory {
		return d.removeImage(id)
	}
	if err := os.MkdirAll(filepath.Join(d.cfg.Root, trashDir), 0o700); err != nil {
		return err
	}
	err := os.Rename(d.directory(id), d.trash(r.Project))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err != nil { // there was no folder yet, or it is in the trash already
		d.forget(r.Project)
	}
	if err := os.Remove(d.recordFile(id)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	select {
	case d.thrown <- struct{}{}:
	default: // it is going to be looked
	}
	return nil
}

// forget takes the limit from an id whose data are going. One that stays, where there are no quotas any more, holds nothing:
// the id is not taken again.
func (d *Driver) forget(project uint32) {
	if err := d.quotas.limit(d.cfg.Root, project, 0, 0); err != nil {
		d.cfg.Log.Warn("a quota that nobody needs stays", "project", project, "err", err)
	}
}

// deleted lists the ids of what is in the trash.
func (d *Driver) deleted() (out []uint32, err error) {
	entries, err := os.ReadDir(filepath.Join(d.cfg.Root, trashDir))
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

// emptyTrash removes what was deleted, a few names at a time, until nothing is left or ctx ends.
func (d *Driver) emptyTrash(ctx context.Context) error {
	all, err := d.deleted()
	if err != nil {
		return err
	}
	var errs []error
	for _, p := range all {
		if err := d.emptyOne(ctx, p); err != nil {
			errs = append(errs, fmt.Errorf("removing what was deleted with project id %d: %w", p, err))
		}
	}
	return errors.Join(errs...)
}

func (d *Driver) emptyOne(ctx context.Context, project uint32) error {
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		left, err := safepath.RemoveContents(d.trash(project), removedAtOnce)
		if err != nil {
			return err
		}
		if !left {
			break
		}
	}
	d.forget(project)
	if err := os.Remove(d.trash(project)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// keepEmpty empties the trash until ctx ends: at the beginning, when something is thrown there, and when it did not succeed.
func (d *Driver) keepEmpty(ctx context.Context) {
	for {
		var again <-chan time.Time
		if err := d.emptyTrash(ctx); err != nil && ctx.Err() == nil {
			d.cfg.Log.Error("emptying the trash", "err", err)
			again = time.After(emptyAgain)
		}
		select {
		case <-ctx.Done():
			return
		case <-d.thrown:
		case <-again:
		}
	}
}

// stageDirectory shows the folder of a volume at the staging path, once it is sure that its size is held.
func (d *Driver) stageDirectory(id string, r record, path string, flags []string) error {
	dir := d.directory(id)
	project, err := d.quotas.borne(dir)
	if errors.Is(err, os.ErrNotExist) {
		return status.Errorf(codes.NotFound, "volume %s has no data on node %s: its folder is gone, and no empty one takes its place", id, d.cfg.NodeID)
	}
	if err == nil {
		err = d.quotas.ready(d.cfg.Root)
	}
	if err == nil && project != r.Project {
		err = fmt.Errorf("%s does not bear the project id by which its size is held: run chattr -R +P -p %d on it", dir, r.Project)
	}
	if err == nil {
		err = d.holdTo(r)
	}
	if err != nil {
		return status.Errorf(codes.FailedPrecondition, "staging volume %s on node %s: %v", id, d.cfg.NodeID, err)
	}
	bits, err := bindFlags(flags)
	if err != nil {
		return status.Errorf(codes.InvalidArgument, "volume %s: %v", id, err)
	}
	if err := bind(dir, path, bits); err != nil {
		return status.Errorf(codes.Internal, "staging volume %s: %v", id, err)
	}
	return nil
}

// bindFlags sorts out the options that a folder can be mounted with: those that are of a mount, and not of a file system.
func bindFlags(flags []string) (uintptr, error) {
	const ofMounts = unix.MS_RDONLY | unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC | unix.MS_NOATIME | unix.MS_NODIRATIME | unix.MS_RELATIME
	bits, rest := mountoption.SplitFlags(flags)
	if bits&^ofMounts != 0 || len(rest) > 0 {
		return 0, fmt.Errorf("mount options %q: a folder (%s: %s) can have ro, nosuid, nodev, noexec, noatime, nodiratime and relatime",
			strings.Join(flags, ","), backingParam, backingDirectory)
	}
	return bits, nil
}

// directoryStats tells how full a folder is, by its quota.
func (d *Driver) directoryStats(id string, r record, path string) (*csi.NodeGetVolumeStatsResponse, error) {
	if ok, err := same(d.directory(id), path); err != nil || !ok {
		return nil, status.Errorf(codes.NotFound, "volume %s is not at %s (%v)", id, path, err)
	}
	u, err := d.quotas.used(d.cfg.Root, r.Project)
	if err != nil {
		return nil, status.Errorf(codes.Internal, "volume %s: %v", id, err)
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(d.cfg.Root, &fs); err != nil {
		return nil, status.Errorf(codes.Internal, "free space of %s: %v", d.cfg.Root, err)
	}
	left := func(total, used, disk int64) int64 { return max(0, min(total-used, disk)) }
	return &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{
		{Unit: csi.VolumeUsage_BYTES, Total: r.Size, Used: u.bytes, Available: left(r.Size, u.bytes, int64(fs.Bavail)*fs.Bsize)},
		{Unit: csi.VolumeUsage_INODES, Total: inodesOf(r.Size), Used: u.inodes, Available: left(inodesOf(r.Size), u.inodes, int64(fs.Ffree))}}}, nil
}
