package backups

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path"
	"strings"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"
)

// S3 is the configuration of the S3 bucket for backups. The zero value means no bucket.
type S3 struct {
	URL         string // s3://BUCKET or s3://BUCKET/PREFIX; empty: no bucket
	Endpoint    string // https://HOST[:PORT], or http:// on a trusted network
	Region      string
	PathStyle   bool   // use URLs https://HOST/BUCKET/NAME instead of https://BUCKET.HOST/NAME
	Credentials string // file in the format of the AWS tools; empty: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY
	CA          string // file of CAs for the server's certificate; empty: the system's CAs
}

// parseURL returns the name of the bucket, and the common prefix of the names of all objects that
// the replica uses in it.
func (s S3) parseURL() (bucket, prefix string, err error) {
	rest, ok := strings.CutPrefix(s.URL, "s3://")
	bucket, prefix, _ = strings.Cut(rest, "/")
	if prefix = strings.Trim(prefix, "/"); prefix != "" {
		prefix += "/"
	}
	if !ok || len(bucket) < 3 || strings.ContainsAny(bucket, "?#@: ") ||
		path.Clean("/"+prefix) != strings.TrimRight("/"+prefix, "/") && prefix != "" {
		return "", "", fmt.Errorf("--backup-s3 %q: want s3://BUCKET or s3://BUCKET/PREFIX", s.URL)
	}
	return bucket, prefix, nil
}

func (s S3) parseEndpoint() (*url.URL, error) {
	u, err := url.Parse(s.Endpoint)
	if err != nil || u.Scheme != "https" && u.Scheme != "http" || u.Host == "" || u.User != nil ||
		strings.Trim(u.Path, "/") != "" || u.RawQuery != "" {
		return nil, fmt.Errorf("--backup-s3-endpoint %q: want https://HOST or https://HOST:PORT", s.Endpoint)
	}
	return u, nil
}

func (s S3) checkFlags() error {
	_, _, err := s.parseURL()
	if err == nil {
		_, err = s.parseEndpoint()
	}
	if err == nil && s.Region == "" {
		err = errors.New("--backup-s3-region: want a region, such as us-east-1; self-hosted servers accept any")
	}
	return err
}

const (
	// partBytes is the size of a part of a multipart upload. A part is buffered in memory. An
	// object has at most 10,000 parts, so a backup has at most 160 GB.
	partBytes = 16 << 20
	// maxResponseBytes is the maximum size of a response that is not a backup.
	maxResponseBytes = 8 << 20
	// maxAttempts is the maximum number of attempts of one request. The pauses between them are at
	// most a second.
	maxAttempts = 4
	// stallTimeout is how long a request may send and receive no data before it is canceled.
	stallTimeout = time.Minute
	// listTimeout is the timeout for listing all backups.
	listTimeout = 5 * time.Minute
	// maxListed is the maximum number of objects in the list of a bucket.
	maxListed = 100_000
)

// bucket stores the backups of a cluster in an S3 bucket; it implements target. Only one replica
// writes to it at a time. Objects with names that do not belong to backups of this cluster are
// ignored.
type bucket struct {
	s3           S3
	bucket       string
	prefix       string // common prefix of the names of this cluster's backups
	replica      string
	stallTimeout time.Duration
}

func newBucket(s S3, cluster, replica string) (*bucket, error) {
	name, prefix, err := s.parseURL()
	return &bucket{s3: s, bucket: name, prefix: prefix + cluster + "_", replica: replica,
		stallTimeout: stallTimeout}, err
}

func (b *bucket) String() string { return "s3://" + b.bucket + "/" + b.prefix }

func (b *bucket) backupName(at time.Time) string {
	return b.prefix + b.replica + "_" + at.UTC().Format(timeFormat) + suffix
}

// parseName returns the time in name, if name is the name of a backup of this cluster, made by any
// replica. Otherwise ok is false.
func (b *bucket) parseName(name string) (at time.Time, ok bool) {
	rest, hasPrefix := strings.CutPrefix(name, b.prefix)
	at, ok = timeInName(rest) // follows the last '_', because names of replicas may contain '_'
	return at, ok && hasPrefix
}

// newClient returns an S3 client with the current contents of the credentials and CA files.
func (b *bucket) newClient() (*minio.Client, error) {
	u, err := b.s3.parseEndpoint()
	if err != nil {
		return nil, err
	}
	creds := credentials.NewEnvAWS()
	if b.s3.Credentials != "" {
		if info, err := os.Stat(b.s3.Credentials); err != nil {
			return nil, fmt.Errorf("--backup-s3-credentials: %w", err)
		} else if info.Mode().Perm()&0o077 != 0 {
			return nil, fmt.Errorf("--backup-s3-credentials: %s can be read by others: make its mode 0600",
				b.s3.Credentials)
		}
		creds = credentials.NewFileAWSCredentials(b.s3.Credentials, "")
	}
	if v, err := creds.GetWithContext(nil); err != nil {
		return nil, fmt.Errorf("credentials for %s: %w", b, err)
	} else if v.AccessKeyID == "" || v.SecretAccessKey == "" {
		return nil,
			fmt.Errorf("credentials for %s: none found: set --backup-s3-credentials, or AWS_ACCESS_KEY_ID and "+
				"AWS_SECRET_ACCESS_KEY", b)
	}
	ways := http.DefaultTransport.(*http.Transport).Clone()
	ways.TLSClientConfig = &tls.Config{MinVersion: tls.VersionTLS12}
	ways.DisableCompression = true
	ways.DisableKeepAlives = false
	ways.MaxResponseHeaderBytes = 1 << 20
	if b.s3.CA != "" {
		pem, err := os.ReadFile(b.s3.CA)
		if err != nil {
			return nil, fmt.Errorf("--backup-s3-ca: %w", err)
		}
		ways.TLSClientConfig.RootCAs = x509.NewCertPool()
		if !ways.TLSClientConfig.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("--backup-s3-ca: %s contains no certificate", b.s3.CA)
		}
	}
	lookup := minio.BucketLookupDNS
	if b.s3.PathStyle {
		lookup = minio.BucketLookupPath
	}
	return minio.New(u.Host, &minio.Options{
		Creds: creds, Secure: u.Scheme == "https", Region: b.s3.Region, BucketLookup: lookup, MaxRetries: maxAttempts,
		Transport: &boundedTransport{ways: ways, stallTimeout: b.stallTimeout},
	})
}

// withClient calls f with an S3 client. If f returns an error, withClient adds the names of the
// bucket and the server to it.
func (b *bucket) withClient(f func(*minio.Client) error) error {
	c, err := b.newClient()
	if err != nil {
		return err
	}
	if err := f(c); err != nil {
		return fmt.Errorf("%s at %s: %w", b, b.s3.Endpoint, err)
	}
	return nil
}

func (b *bucket) listBackups(ctx context.Context, now time.Time) (out []storedBackup, err error) {
	err = b.withClient(func(c *minio.Client) error {
		out, err = b.listObjects(ctx, c, now)
		return err
	})
	return out, err
}

func (b *bucket) listObjects(ctx context.Context, c *minio.Client, now time.Time) (out []storedBackup, err error) {
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	n := 0
	for o := range c.ListObjects(ctx, b.bucket, minio.ListObjectsOptions{Prefix: b.prefix, Recursive: true}) {
		if o.Err != nil {
			return nil, fmt.Errorf("listing: %w", o.Err)
		}
		if n++; n > maxListed {
			return nil, fmt.Errorf("there are more than %d names: give the backups a prefix of their own", maxListed)
		}
		if at, ours := b.parseName(o.Key); ours {
			out = append(out, storedBackup{path: o.Key, madeAt: at})
		}
	}
	if ctx.Err() != nil { // the list may be incomplete
		return nil, fmt.Errorf("listing: %w", context.Cause(ctx))
	}
	sortBackups(out, now)
	return out, nil
}

// writeBackup uploads a backup and reads it back. It removes the backup if it differs from the data
// that was sent. The object appears in the bucket when all parts are uploaded. Before the upload,
// writeBackup removes incomplete uploads of earlier attempts.
func (b *bucket) writeBackup(ctx context.Context, at time.Time, content func(context.Context, io.Writer) error) (
	size int64, err error,
) {
	err = b.withClient(func(c *minio.Client) error {
		b.removeIncompleteUploads(ctx, c)
		size, err = b.uploadBackup(ctx, c, b.backupName(at), content)
		return err
	})
	return size, err
}

func (b *bucket) uploadBackup(
	ctx context.Context, c *minio.Client, name string, content func(context.Context, io.Writer) error,
) (int64, error) {
	outer := ctx
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	r, w := io.Pipe()
	sum := &checksumWriter{h: sha256.New()}
	ended := make(chan error, 1)
	go func() {
		err := content(ctx, io.MultiWriter(w, sum))
		w.CloseWithError(err) // nil means the end of the data
		ended <- err
	}()
	_, err := c.PutObject(ctx, b.bucket, name, r, -1, minio.PutObjectOptions{
		PartSize: partBytes, NumThreads: 1, ContentType: "application/octet-stream",
	})
	r.CloseWithError(errors.Join(err, io.ErrClosedPipe))
	cancel()
	if made := <-ended; made != nil && (err == nil || errors.Is(err, made)) {
		err = made // the error of the store explains more than that of the pipe
	}
	if err != nil {
		err = fmt.Errorf("sending %s: %w", name, err)
	} else {
		err = b.verifyUpload(outer, c, name, sum)
	}
	if err != nil { // the object may exist although the response was lost
		forget, stop := context.WithTimeout(context.WithoutCancel(outer), 2*b.stallTimeout)
		defer stop()
		_ = c.RemoveObject(forget, b.bucket, name, minio.RemoveObjectOptions{})
		return 0, err
	}
	return sum.n, nil
}

// verifyUpload reads the backup with the given name from the bucket. It returns an error unless its
// size and checksum equal want, those of the data that was sent.
func (b *bucket) verifyUpload(ctx context.Context, c *minio.Client, name string, want *checksumWriter) error {
	in, err := c.GetObject(ctx, b.bucket, name, minio.GetObjectOptions{})
	if err != nil {
		return fmt.Errorf("reading %s back: %w", name, err)
	}
	defer in.Close()
	have := &checksumWriter{h: sha256.New()}
	if _, err := io.Copy(have, io.LimitReader(in, want.n+1)); err != nil {
		return fmt.Errorf("reading %s back: %w", name, err)
	}
	if have.n != want.n || !bytes.Equal(have.h.Sum(nil), want.h.Sum(nil)) {
		return fmt.Errorf("%s differs from the data that was sent", name)
	}
	return nil
}

// removeIncompleteUploads removes the incomplete uploads of this cluster's backups. No other
// process writes such backups. Errors are ignored: some servers cannot list incomplete uploads.
func (b *bucket) removeIncompleteUploads(ctx context.Context, c *minio.Client) {
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	n := 0
	for u := range c.ListIncompleteUploads(ctx, b.bucket, b.prefix, true) {
		if n++; u.Err != nil || n > 1000 {
			return
		}
		if _, ours := b.parseName(u.Key); ours {
			if c.RemoveIncompleteUpload(ctx, b.bucket, u.Key) != nil {
				return
			}
		}
	}
}

func (b *bucket) pruneBackups(ctx context.Context, now time.Time, keep int) (removed []string, err error) {
	err = b.withClient(func(c *minio.Client) error {
		all, err := b.listObjects(ctx, c, now)
		for ; err == nil && len(all) > keep; all = all[1:] {
			if err = c.RemoveObject(ctx, b.bucket, all[0].path, minio.RemoveObjectOptions{}); err == nil {
				removed = append(removed, all[0].path)
			}
		}
		return err
	})
	return removed, err
}
