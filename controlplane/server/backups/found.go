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
)

// Found is a backup in a folder or bucket, of whichever cluster and replica.
type Found struct {
	Name string    // of the file, or of the object in the bucket
	Of   time.Time // the time that its name says
	Size int64
}

// ErrNone says that there is no backup.
var ErrNone = errors.New("there is no backup there")

// Look lists the backups in the folder or the bucket of o, the newest first. What has other names is left out.
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
	slices.SortFunc(out, func(a, b Found) int { return cmp.Or(b.Of.Compare(a.Of), cmp.Compare(a.Name, b.Name)) })
	return out, err
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
		out = append(out, Found{Name: filepath.Join(dir, e.Name()), Of: at, Size: info.Size()})
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
				out = append(out, Found{Name: o.Key, Of: at, Size: o.Size})
			}
		}
		return context.Cause(ctx) // the list may have ended early
	})
	return out, err
}

// Fetch writes a backup that Look has named to w. It may take an hour at most.
func Fetch(ctx context.Context, o Options, f Found, w io.Writer) error {
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
