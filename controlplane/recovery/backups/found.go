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

// Found is a backup in a folder or bucket, of whichever cluster and replica.
type Found struct {
	Name    string    // of the file, or of the object in the bucket
	Cluster string    // its ID, or what the release before put in place of it where nothing tells the ID
	Of      time.Time // the time that its name says
	Ahead   bool      // that time is still to come
	Size    int64
}

// ErrNone says that there is no backup.
var ErrNone = errors.New("there is no backup there")

// skew is how far the clocks of two machines may be apart: so far ahead a backup may be of a replica's now.
const skew = 5 * time.Minute

// Look lists the backups in the folder or the bucket of o, the newest first. Those of times to come count as older than all
// others, as they do for the replica that made them: nobody knows when that was. What has other names is left out.
func Look(ctx context.Context, o Options) (out []Found, err error) {
	switch {
	case o.Folder != "" && o.S3.URL != "":
		return nil, errors.New("--backup-folder and --backup-s3: want one of them")
	case o.S3.URL != "":
		out, err = lookInBucket(ctx, o.S3)
	case o.Folder != "":
		out, err = lookInFolder(o.Folder)
	default:
		return nil, errors.New("nothing says where backups are: name a file, or give --backup-folder or --backup-s3")
	}
	now := time.Now().Add(skew)
	age := func(f Found) int { // 0 or 1
		if f.Ahead {
			return 1
		}
		return 0
	}
	for i := range out {
		out[i].Ahead = out[i].Of.After(now)
	}
	slices.SortFunc(out, func(a, b Found) int {
		return cmp.Or(age(a)-age(b), b.Of.Compare(a.Of), cmp.Compare(a.Name, b.Name))
	})
	return out, err
}

// Newest is the newest of the backups of a cluster, which are the newest first. Where nobody says of which one, "", there
// must be those of one alone.
func Newest(all []Found, cluster string) (Found, error) {
	var others []string
	for _, f := range all {
		if cluster != "" && f.of(cluster) {
			return f, nil
		}
		if !slices.Contains(others, f.Cluster) {
			others = append(others, f.Cluster)
		}
	}
	slices.Sort(others)
	switch {
	case len(all) == 0:
		return Found{}, fmt.Errorf("%w: neither --backup-folder nor --backup-s3 has one", ErrNone)
	case cluster != "":
		return Found{}, fmt.Errorf("%w of cluster %s: --backup-cluster takes the newest of another one; there are those of %s", ErrNone, cluster, strings.Join(others, ", "))
	case len(others) > 1:
		return Found{}, fmt.Errorf("there are backups of several clusters, of %s: --backup-cluster says whose newest is meant", strings.Join(others, ", "))
	}
	return all[0], nil
}

// of says whether a backup is of a cluster: by its name, as the replica that made it goes by, or else by its head.
func (f Found) of(cluster string) bool {
	return f.Cluster == cluster || strings.HasPrefix(path.Base(f.Name), cluster+"_")
}

// clusterOf is what stands for the cluster in the name of a backup.
func clusterOf(name string) string {
	cluster, _, _ := strings.Cut(name, "_")
	return cluster
}

// headOf is the ID of the cluster in the head of a file, or what its name says where the head cannot be read: age may have
// sealed it.
func headOf(file string) string {
	if in, err := os.Open(file); err == nil {
		defer in.Close()
		if id, err := disk.BackupCluster(in); err == nil && id != "" {
			return id
		}
	}
	return clusterOf(filepath.Base(file))
}

// timeOf is the time in the name of a backup.
func timeOf(name string) (time.Time, bool) {
	rest, named := strings.CutSuffix(name, suffix)
	at, err := time.Parse(stamp, rest[strings.LastIndexByte(rest, '_')+1:])
	return at, named && err == nil && strings.Contains(rest, "_")
}

func lookInFolder(dir string) (out []Found, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		at, ok := timeOf(e.Name())
		if !ok || !e.Type().IsRegular() {
			continue
		}
		info, err := e.Info()
		if errors.Is(err, os.ErrNotExist) { // it has just made room for a newer one
			continue
		}
		if err != nil {
			return nil, err
		}
		name := filepath.Join(dir, e.Name())
		out = append(out, Found{Name: name, Cluster: headOf(name), Of: at, Size: info.Size()})
	}
	return out, nil
}

// wholeBucket is a bucket in which whatever is below the prefix is looked at.
func wholeBucket(s S3) (*bucket, error) {
	if err := s.check(); err != nil {
		return nil, err
	}
	name, prefix, err := s.place()
	return &bucket{s3: s, bucket: name, prefix: prefix, silence: silence}, err
}

func lookInBucket(ctx context.Context, s S3) (out []Found, err error) {
	b, err := wholeBucket(s)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, lookTime)
	defer cancel()
	err = b.with(func(c *minio.Client) error {
		n := 0
		for o := range c.ListObjects(ctx, b.bucket, minio.ListObjectsOptions{Prefix: b.prefix, Recursive: true}) {
			if o.Err != nil {
				return fmt.Errorf("listing: %w", o.Err)
			}
			if n++; n > mostListed {
				return fmt.Errorf("there are more than %d names: give the backups a prefix of their own", mostListed)
			}
			if at, ok := timeOf(path.Base(o.Key)); ok {
				out = append(out, Found{Name: o.Key, Cluster: clusterOf(path.Base(o.Key)), Of: at, Size: o.Size})
			}
		}
		return context.Cause(ctx) // the list may have ended early
	})
	return out, err
}

// Fetch writes a backup that Look has named to w, which is a file on a disk, as long as there is room. It may take an hour at
// most.
func Fetch(ctx context.Context, o Options, f Found, on diskheadroom.Target, w io.Writer) error {
	if err := on.CheckFree(f.Size); err != nil {
		return err
	}
	w = on.Writer(w)
	ctx, cancel := context.WithTimeout(ctx, mostTime)
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
	b, err := wholeBucket(o.S3)
	if err != nil {
		return err
	}
	return b.with(func(c *minio.Client) error {
		in, err := c.GetObject(ctx, b.bucket, f.Name, minio.GetObjectOptions{})
		if err != nil {
			return fmt.Errorf("reading %s: %w", f.Name, err)
		}
		defer in.Close()
		n, err := io.Copy(w, io.LimitReader(in, f.Size+1))
		if err == nil && n != f.Size {
			err = fmt.Errorf("%d bytes came of %d", n, f.Size)
		}
		if err != nil {
			return fmt.Errorf("reading %s: %w", f.Name, err)
		}
		return nil
	})
}
