package backups

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/minio/minio-go/v7"

	"keelson.dev/keelson/internal/diskheadroom"
	"keelson.dev/keelson/raftstore/disk"
)

// FoundBackup is a backup, of any cluster and replica, that ListBackups has found in a directory or
// bucket.
type FoundBackup struct {
	Name     string    // path of the file, or name of the object in the bucket
	Cluster  string    // ID of the cluster, or its name for a file of a previous release
	MadeAt   time.Time // the time in its name
	InFuture bool      // MadeAt is further in the future than maxClockSkew
	Size     int64
}

// ErrNone is returned by Newest if no backup is suitable.
var ErrNone = errors.New("no backup found")

// maxClockSkew is the accepted difference between the clocks of two machines. A backup is marked
// with FoundBackup.InFuture if its time is further in the future.
const maxClockSkew = 5 * time.Minute

// ListBackups returns the backups in the directory or the bucket of o, newest first. Backups with a
// time in the future are last, because their age is unknown. Other files are ignored.
func ListBackups(ctx context.Context, o Options) (out []FoundBackup, err error) {
	switch {
	case o.Folder != "" && o.S3.URL != "":
		return nil, errors.New("--backup-folder and --backup-s3: want one of them")
	case o.S3.URL != "":
		out, err = listBucket(ctx, o.S3)
	case o.Folder != "":
		out, err = listFolder(o.Folder)
	default:
		return nil, errors.New("no backup is selected: name a file, or set --backup-folder or --backup-s3")
	}
	now := time.Now().Add(maxClockSkew)
	age := func(f FoundBackup) int { // 0 for a time in the future, otherwise 1
		if f.InFuture {
			return 1
		}
		return 0
	}
	for i := range out {
		out[i].InFuture = out[i].MadeAt.After(now)
	}
	slices.SortFunc(out, func(a, b FoundBackup) int {
		return cmp.Or(age(a)-age(b), b.MadeAt.Compare(a.MadeAt), cmp.Compare(a.Name, b.Name))
	})
	return out, err
}

// Newest returns the newest backup of a cluster. candidates must be sorted, newest first. cluster
// is the ID of the cluster; it may be empty if all candidates are backups of the same cluster.
func Newest(candidates []FoundBackup, cluster string) (FoundBackup, error) {
	var others []string
	for _, f := range candidates {
		if cluster != "" && f.belongsTo(cluster) {
			return f, nil
		}
		if !slices.Contains(others, f.Cluster) {
			others = append(others, f.Cluster)
		}
	}
	slices.Sort(others)
	switch {
	case len(candidates) == 0:
		return FoundBackup{}, fmt.Errorf("%w: neither --backup-folder nor --backup-s3 has one", ErrNone)
	case cluster != "":
		return FoundBackup{},
			fmt.Errorf("%w of cluster %s: --backup-cluster selects another cluster; there are backups of %s",
				ErrNone, cluster, strings.Join(others, ", "))
	case len(others) > 1:
		return FoundBackup{},
			fmt.Errorf("there are backups of several clusters (%s): --backup-cluster selects one",
				strings.Join(others, ", "))
	}
	return candidates[0], nil
}

// belongsTo reports whether a backup belongs to the cluster with the ID cluster. The ID is in the
// header of the backup or is the prefix of its name.
func (f FoundBackup) belongsTo(cluster string) bool {
	return f.Cluster == cluster || strings.HasPrefix(path.Base(f.Name), cluster+"_")
}

// clusterInName returns the part of a backup's name before the first "_": the ID or the name of the
// cluster.
func clusterInName(name string) string {
	cluster, _, _ := strings.Cut(name, "_")
	return cluster
}

// clusterInFile returns the cluster ID in the header of a backup file. If the header is not
// readable, as in a file that is encrypted with age, it returns the first part of the file name.
func clusterInFile(file string) string {
	if in, err := os.Open(file); err == nil {
		defer in.Close()
		if id, err := disk.ReadBackupCluster(in); err == nil && id != "" {
			return id
		}
	}
	return clusterInName(filepath.Base(file))
}

// timeInName returns the time in the name of a backup. It returns false if name is not the name of
// a backup.
func timeInName(name string) (time.Time, bool) {
	rest, named := strings.CutSuffix(name, suffix)
	at, err := time.Parse(timeFormat, rest[strings.LastIndexByte(rest, '_')+1:])
	return at, named && err == nil && strings.Contains(rest, "_")
}

func listFolder(dir string) (out []FoundBackup, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		at, ok := timeInName(e.Name())
		if !ok || !e.Type().IsRegular() {
			continue
		}
		info, err := e.Info()
		if errors.Is(err, os.ErrNotExist) { // it was pruned meanwhile
			continue
		}
		if err != nil {
			return nil, err
		}
		name := filepath.Join(dir, e.Name())
		out = append(out, FoundBackup{Name: name, Cluster: clusterInFile(name), MadeAt: at, Size: info.Size()})
	}
	return out, nil
}

// newListingBucket returns a bucket for listing the backups of all clusters below the prefix in
// s.URL.
func newListingBucket(s S3) (*bucket, error) {
	if err := s.checkFlags(); err != nil {
		return nil, err
	}
	name, prefix, err := s.parseURL()
	return &bucket{s3: s, bucket: name, prefix: prefix, stallTimeout: stallTimeout}, err
}

func listBucket(ctx context.Context, s S3) (out []FoundBackup, err error) {
	b, err := newListingBucket(s)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	err = b.withClient(func(c *minio.Client) error {
		n := 0
		for o := range c.ListObjects(ctx, b.bucket, minio.ListObjectsOptions{Prefix: b.prefix, Recursive: true}) {
			if o.Err != nil {
				return fmt.Errorf("listing: %w", o.Err)
			}
			if n++; n > maxListed {
				return fmt.Errorf("there are more than %d names: give the backups a prefix of their own", maxListed)
			}
			if at, ok := timeInName(path.Base(o.Key)); ok {
				out = append(out, FoundBackup{Name: o.Key, Cluster: clusterInName(path.Base(o.Key)),
					MadeAt: at, Size: o.Size})
			}
		}
		return context.Cause(ctx) // the list may be incomplete
	})
	return out, err
}

// Fetch copies the backup f from the directory or bucket of o to w, a file on the disk that
// destination describes. It returns an error if that disk has not enough free space, or if the copy
// takes more than an hour.
func Fetch(ctx context.Context, o Options, f FoundBackup, destination diskheadroom.Target, w io.Writer) error {
	if err := destination.CheckFree(f.Size); err != nil {
		return err
	}
	w = destination.Writer(w)
	ctx, cancel := context.WithTimeout(ctx, backupTimeout)
	defer cancel()
	if o.S3.URL == "" {
		in, err := os.Open(f.Name)
		if err != nil {
			return err
		}
		defer in.Close()
		_, err = io.Copy(w, in)
		return err
	}
	b, err := newListingBucket(o.S3)
	if err != nil {
		return err
	}
	return b.withClient(func(c *minio.Client) error {
		in, err := c.GetObject(ctx, b.bucket, f.Name, minio.GetObjectOptions{})
		if err != nil {
			return fmt.Errorf("reading %s: %w", f.Name, err)
		}
		defer in.Close()
		n, err := io.Copy(w, io.LimitReader(in, f.Size+1))
		if err == nil && n != f.Size {
			err = fmt.Errorf("received %d bytes of %d", n, f.Size)
		}
		if err != nil {
			return fmt.Errorf("reading %s: %w", f.Name, err)
		}
		return nil
	})
}
