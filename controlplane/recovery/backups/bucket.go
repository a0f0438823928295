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

// S3 says which bucket backups go to; the zero value is none.
type S3 struct {
	URL         string // s3://BUCKET or s3://BUCKET/PREFIX; "" = no bucket
	Endpoint    string // https://HOST[:PORT], or http:// where nothing on the way can listen
	Region      string
	PathStyle   bool   // https://HOST/BUCKET/NAME, and not https://BUCKET.HOST/NAME
	Credentials string // a file in the AWS tools' form; "" = AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY of the environment
	CA          string // file of the authorities that the server's certificate may be of; "" = the machine's
}

// place is the bucket and what all names begin with.
func (s S3) place() (bucket, prefix string, err error) {
	rest, ok := strings.CutPrefix(s.URL, "s3://")
	bucket, prefix, _ = strings.Cut(rest, "/")
	if prefix = strings.Trim(prefix, "/"); prefix != "" {
		prefix += "/"
	}
	if !ok || len(bucket) < 3 || strings.ContainsAny(bucket, "?#@: ") || path.Clean("/"+prefix) != strings.TrimRight("/"+prefix, "/") && prefix != "" {
		return "", "", fmt.Errorf("--backup-s3 %q: want s3://BUCKET or s3://BUCKET/PREFIX", s.URL)
	}
	return bucket, prefix, nil
}

func (s S3) server() (*url.URL, error) {
	u, err := url.Parse(s.Endpoint)
	if err != nil || u.Scheme != "https" && u.Scheme != "http" || u.Host == "" || u.User != nil || strings.Trim(u.Path, "/") != "" || u.RawQuery != "" {
		return nil, fmt.Errorf("--backup-s3-endpoint %q: want https://HOST or https://HOST:PORT", s.Endpoint)
	}
	return u, nil
}

func (s S3) check() error {
	_, _, err := s.place()
	if err == nil {
		_, err = s.server()
	}
	if err == nil && s.Region == "" {
		err = errors.New("--backup-s3-region: say which, such as us-east-1; servers of one's own take any")
	}
	return err
}

const (
	// partBytes is what is held of a backup on its way. A bucket takes 10,000 parts: 160 GB.
	partBytes = 16 << 20
	// answerBytes bounds every answer that is no backup.
	answerBytes = 8 << 20
	// tries bounds how often one call is repeated, with a second at most between two.
	tries = 4
	// silence is for how long a call may neither send nor receive anything.
	silence = time.Minute
	// lookTime bounds looking what is there, however many pages there are.
	lookTime = 5 * time.Minute
	// mostListed bounds how many names are looked at.
	mostListed = 100_000
)

// bucket is where the backups of a cluster are; one replica after the other writes there. What has other names there is
// nobody's business, as in a folder.
type bucket struct {
	s3      S3
	bucket  string
	prefix  string // of the names of this cluster's backups, with that of the place
	replica string
	silence time.Duration
}

func newBucket(s S3, cluster, replica string) (*bucket, error) {
	name, prefix, err := s.place()
	return &bucket{s3: s, bucket: name, prefix: prefix + cluster + "_", replica: replica, silence: silence}, err
}

func (b *bucket) String() string { return "s3://" + b.bucket + "/" + b.prefix }

func (b *bucket) name(at time.Time) string {
	return b.prefix + b.replica + "_" + at.UTC().Format(stamp) + suffix
}

// made says for which time a name says that a backup was made, whichever replica did.
func (b *bucket) made(name string) (at time.Time, ours bool) {
	rest, ours := strings.CutPrefix(name, b.prefix)
	at, named := timeOf(rest) // behind the last '_': names of replicas may have one
	return at, ours && named
}

// connect makes a client, with the credentials and authorities of this moment.
func (b *bucket) connect() (*minio.Client, error) {
	u, err := b.s3.server()
	if err != nil {
		return nil, err
	}
	creds := credentials.NewEnvAWS()
	if b.s3.Credentials != "" {
		if info, err := os.Stat(b.s3.Credentials); err != nil {
			return nil, fmt.Errorf("--backup-s3-credentials: %w", err)
		} else if info.Mode().Perm()&0o077 != 0 {
			return nil, fmt.Errorf("--backup-s3-credentials: %s can be read by others: make its mode 0600", b.s3.Credentials)
		}
		creds = credentials.NewFileAWSCredentials(b.s3.Credentials, "")
	}
	if v, err := creds.GetWithContext(nil); err != nil {
		return nil, fmt.Errorf("credentials for %s: %w", b, err)
	} else if v.AccessKeyID == "" || v.SecretAccessKey == "" {
		return nil, fmt.Errorf("credentials for %s: there are none: name a file by --backup-s3-credentials, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", b)
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
			return nil, fmt.Errorf("--backup-s3-ca: %s holds no certificate", b.s3.CA)
		}
	}
	lookup := minio.BucketLookupDNS
	if b.s3.PathStyle {
		lookup = minio.BucketLookupPath
	}
	return minio.New(u.Host, &minio.Options{
		Creds: creds, Secure: u.Scheme == "https", Region: b.s3.Region, BucketLookup: lookup, MaxRetries: tries,
		Transport: &bounded{ways: ways, silence: b.silence},
	})
}

// with gives a client for as long as f runs.
func (b *bucket) with(f func(*minio.Client) error) error {
	c, err := b.connect()
	if err != nil {
		return err
	}
	if err := f(c); err != nil {
		return fmt.Errorf("%s at %s: %w", b, b.s3.Endpoint, err)
	}
	return nil
}

func (b *bucket) list(ctx context.Context, now time.Time) (out []one, err error) {
	err = b.with(func(c *minio.Client) error {
		out, err = b.look(ctx, c, now)
		return err
	})
	return out, err
}

func (b *bucket) look(ctx context.Context, c *minio.Client, now time.Time) (out []one, err error) {
	ctx, cancel := context.WithTimeout(ctx, lookTime)
	defer cancel()
	n := 0
	for o := range c.ListObjects(ctx, b.bucket, minio.ListObjectsOptions{Prefix: b.prefix, Recursive: true}) {
		if o.Err != nil {
			return nil, fmt.Errorf("listing: %w", o.Err)
		}
		if n++; n > mostListed {
			return nil, fmt.Errorf("there are more than %d names: give the backups a prefix of their own", mostListed)
		}
		if at, ours := b.made(o.Key); ours {
			out = append(out, one{path: o.Key, of: at})
		}
	}
	if ctx.Err() != nil { // the list may have ended early
		return nil, fmt.Errorf("listing: %w", context.Cause(ctx))
	}
	inOrder(out, now)
	return out, nil
}

// write makes the backup of a time. It is there when all parts are; it is read back then, and goes when it is not what was
// written. What an attempt has left that broke off is removed before.
func (b *bucket) write(ctx context.Context, at time.Time, content func(context.Context, io.Writer) error) (size int64, err error) {
	err = b.with(func(c *minio.Client) error {
		b.sweep(ctx, c)
		size, err = b.send(ctx, c, b.name(at), content)
		return err
	})
	return size, err
}

func (b *bucket) send(ctx context.Context, c *minio.Client, name string, content func(context.Context, io.Writer) error) (int64, error) {
	outer := ctx
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	r, w := io.Pipe()
	sum := &summing{h: sha256.New()}
	ended := make(chan error, 1)
	go func() {
		err := content(ctx, io.MultiWriter(w, sum))
		w.CloseWithError(err) // nil is the end
		ended <- err
	}()
	_, err := c.PutObject(ctx, b.bucket, name, r, -1, minio.PutObjectOptions{
		PartSize: partBytes, NumThreads: 1, ContentType: "application/octet-stream",
	})
	r.CloseWithError(errors.Join(err, io.ErrClosedPipe))
	cancel()
	if made := <-ended; made != nil && (err == nil || errors.Is(err, made)) {
		err = made // the store's word and not that of who reads from it
	}
	if err != nil {
		err = fmt.Errorf("sending %s: %w", name, err)
	} else {
		err = b.same(outer, c, name, sum)
	}
	if err != nil { // the server may have it all the same: its answer may have been lost
		forget, stop := context.WithTimeout(context.WithoutCancel(outer), 2*b.silence)
		defer stop()
		_ = c.RemoveObject(forget, b.bucket, name, minio.RemoveObjectOptions{})
		return 0, err
	}
	return sum.n, nil
}

// same reads a backup back.
func (b *bucket) same(ctx context.Context, c *minio.Client, name string, want *summing) error {
	in, err := c.GetObject(ctx, b.bucket, name, minio.GetObjectOptions{})
	if err != nil {
		return fmt.Errorf("reading %s back: %w", name, err)
	}
	defer in.Close()
	have := &summing{h: sha256.New()}
	if _, err := io.Copy(have, io.LimitReader(in, want.n+1)); err != nil {
		return fmt.Errorf("reading %s back: %w", name, err)
	}
	if have.n != want.n || !bytes.Equal(have.h.Sum(nil), want.h.Sum(nil)) {
		return fmt.Errorf("%s does not hold what was sent to it", name)
	}
	return nil
}

// sweep removes parts of this cluster's backups that broke off: who writes now is the only one. A server that cannot list
// them keeps them: that is no reason to make no backup.
func (b *bucket) sweep(ctx context.Context, c *minio.Client) {
	ctx, cancel := context.WithTimeout(ctx, lookTime)
	defer cancel()
	n := 0
	for u := range c.ListIncompleteUploads(ctx, b.bucket, b.prefix, true) {
		if n++; u.Err != nil || n > 1000 {
			return
		}
		if _, ours := b.made(u.Key); ours {
			if c.RemoveIncompleteUpload(ctx, b.bucket, u.Key) != nil {
				return
			}
		}
	}
}

func (b *bucket) prune(ctx context.Context, now time.Time, keep int) (removed []string, err error) {
	err = b.with(func(c *minio.Client) error {
		all, err := b.look(ctx, c, now)
		for ; err == nil && len(all) > keep; all = all[1:] {
			if err = c.RemoveObject(ctx, b.bucket, all[0].path, minio.RemoveObjectOptions{}); err == nil {
				removed = append(removed, all[0].path)
			}
		}
		return err
	})
	return removed, err
}
