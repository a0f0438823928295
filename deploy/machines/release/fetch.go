package release

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"keelson.dev/keelson/internal/durable"
)

// fetchTimeout is the maximum duration of the download of one file.
const fetchTimeout = 30 * time.Minute

// fetchRelease downloads the files of a release into a folder below the folder cache, and returns
// the path of that folder. location is the URL of one tarball of the release. A file that already
// has the SHA-256 sum in SHA256SUMS is not downloaded again. SHA256SUMS is downloaded each time. It
// is not signed, and comes from the same place as the release.
func fetchRelease(ctx context.Context, location, cache string) (folder string, err error) {
	u, err := url.Parse(location)
	if err != nil {
		return "", err
	}
	names, err := releaseFiles(path.Base(u.Path))
	if err != nil {
		return "", err
	}
	of := sha256.Sum256([]byte(u.Scheme + "://" + u.Host + path.Dir(u.Path)))
	folder = filepath.Join(cache, hex.EncodeToString(of[:8]))
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return "", err
	}
	beside := func(name string) string {
		v := *u
		v.Path, v.RawPath = path.Join(path.Dir(u.Path), name), ""
		return v.String()
	}
	if err := downloadFile(ctx, beside(sumsFile), filepath.Join(folder, sumsFile), maxSums); err != nil {
		return "", err
	}
	sums, err := readSums(filepath.Join(folder, sumsFile))
	if err != nil {
		return "", err
	}
	for i, name := range names {
		want, listed := sums[name]
		if !listed {
			if i == 0 {
				return "", fmt.Errorf("%s is not in %s beside it", name, sumsFile)
			}
			continue // the release was not built for this architecture
		}
		to := filepath.Join(folder, name)
		if is, err := fileSHA256(to); err == nil && is == want {
			continue
		}
		if err := downloadFile(ctx, beside(name), to, maxFile); err != nil {
			return "", err
		}
	}
	return folder, nil
}

func fileSHA256(file string) (string, error) {
	f, err := os.Open(file)
	if err != nil {
		return "", err
	}
	defer f.Close()
	sum := sha256.New()
	if _, err := io.Copy(sum, f); err != nil {
		return "", err
	}
	return hex.EncodeToString(sum.Sum(nil)), nil
}

// downloadFile downloads the content of sourceURL to the file destination. The file gets the
// complete content, or it is not changed. downloadFile returns an error if the content has more
// than limit bytes.
func downloadFile(ctx context.Context, sourceURL, destination string, limit int64) (err error) {
	ctx, cancel := context.WithTimeout(ctx, fetchTimeout)
	defer cancel()
	defer func() {
		if err != nil {
			err = fmt.Errorf("fetching %s: %w", sourceURL, err)
		}
	}()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, sourceURL, nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return errors.New(strings.ToLower(resp.Status))
	}
	f, err := durable.Create(destination, durable.Options{Level: durable.Atomic, TempPattern: ".part-"})
	if err != nil {
		return err
	}
	n, err := io.Copy(f, io.LimitReader(resp.Body, limit+1))
	if err == nil && n > limit {
		err = fmt.Errorf("it has more than %d bytes", limit)
	}
	if err != nil {
		return errors.Join(err, f.Discard())
	}
	return f.Commit()
}
