package image

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/klauspost/compress/zstd"
	"golang.org/x/sync/errgroup"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/safepath"
)

// parallelLayers bounds how many layers of an image are fetched concurrently.
const parallelLayers = 3

// chainIDs returns the chain ID of each layer, as defined by OCI. It identifies the layer together
// with all layers below it. The content of an unpacked layer can depend on the layers below,
// because folders that the layer does not list keep their mode.
func chainIDs(diffs []v1.Hash) []string {
	var out []string
	for i, d := range diffs {
		if i == 0 {
			out = append(out, d.String())
			continue
		}
		sum := sha256.Sum256([]byte(out[i-1] + " " + d.String()))
		out = append(out, "sha256:"+hex.EncodeToString(sum[:]))
	}
	return out
}

// unpackAll fetches and unpacks all missing layers of an image concurrently. A layer is finished
// after all layers below it. what is the image's name for errors; diffs and chain are the layers'
// diff IDs and chain IDs.
func (s *Store) unpackAll(ctx context.Context, what string, layers []v1.Layer, diffs []v1.Hash, chain []string) error {
	leave, err := s.acquireUnpackSlot(ctx)
	if err != nil {
		return err
	}
	defer leave()
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(parallelLayers)
	finished := make([]chan struct{}, len(layers))
	for i := range finished {
		finished[i] = make(chan struct{})
	}
	for i := range layers {
		var below []string
		for j := i - 1; j >= 0; j-- {
			below = append(below, s.storePath("layers", layerKey(chain[j])))
		}
		g.Go(func() error {
			_, err, _ := s.layers.Do(chain[i], func() (any, error) {
				return nil, s.unpackLayer(ctx, layers[i], diffs[i], chain[i], below, finished[:i])
			})
			if err != nil {
				digest, _ := layers[i].Digest()
				if errors.Is(err, errFetch) || ctx.Err() != nil {
					return fmt.Errorf("layer %d (%s): %w", i+1, digest, err)
				}
				return fmt.Errorf("%w: image %s, layer %d of %d (%s): %w", agent.ErrImageUnpack, what, i+1, len(layers), digest, err)
			}
			close(finished[i])
			return nil
		})
	}
	return g.Wait()
}

// errFetch is wrapped by errors that occurred while data was fetched. Other errors mean that the
// data is invalid.
var errFetch = errors.New("fetch")

// fetchReader wraps the errors of an io.Reader in errFetch.
type fetchReader struct{ io.Reader }

func (f fetchReader) Read(p []byte) (int, error) {
	n, err := f.Reader.Read(p)
	if err != nil && err != io.EOF {
		err = fmt.Errorf("%w: %w", errFetch, err)
	}
	return n, err
}

func (s *Store) unpackLayer(ctx context.Context, l v1.Layer, diff v1.Hash, chainID string, below []string, belowDone []chan struct{}) error {
	final := s.storePath("layers", layerKey(chainID))
	if _, err := os.Stat(final); err == nil {
		return nil
	}
	tmp, err := mkdirTemp(s.storePath("tmp"), "layer-")
	if err != nil {
		return err
	}
	defer safepath.RemoveAll(filepath.Dir(tmp))
	blob, err := l.Compressed()
	if err != nil {
		return fmt.Errorf("%w: %w", errFetch, err)
	}
	defer blob.Close()
	stop := context.AfterFunc(ctx, func() { blob.Close() })
	defer stop()
	tar, err := newDecompressor(fetchReader{blob})
	if err != nil {
		return err
	}
	defer tar.Close()
	sum := sha256.New()
	u, err := newUnpacker(tmp, s.limits)
	if err != nil {
		return err
	}
	defer u.closeRoot()
	whole := io.TeeReader(&boundedReader{tar, s.limits.archiveBytes()}, sum)
	if err := u.unpackArchive(whole); err != nil {
		return err
	}
	// The digest also covers data after the end of the archive.
	if _, err := io.Copy(io.Discard, whole); err != nil {
		return err
	}
	if got := hex.EncodeToString(sum.Sum(nil)); got != diff.Hex {
		return fmt.Errorf("content is sha256:%s, but the image's config lists %s", got, diff)
	}
	for _, done := range belowDone {
		select {
		case <-done:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if err := u.finishLayer(below); err != nil {
		return err
	}
	if err := syncTree(tmp); err != nil {
		return err
	}
	if err := saveJSON(final+".json", &layerRecord{ChainID: chainID, DiffID: diff.String(), Bytes: u.meter.bytes,
		Inodes: u.inodes}); err != nil {
		return err
	}
	return os.Rename(tmp, final)
}

// maxWindow bounds the memory for the window of a zstd decompressor. It is the window of zstd's
// highest level.
const maxWindow = 128 << 20

// newDecompressor returns a reader of the decompressed data of r. It detects gzip and zstd by their
// first bytes, and returns other data unchanged.
func newDecompressor(r io.Reader) (io.ReadCloser, error) {
	b := bufio.NewReaderSize(r, 64<<10)
	head, err := b.Peek(4)
	if err != nil && err != io.EOF {
		return nil, err
	}
	switch {
	case bytes.HasPrefix(head, []byte{0x1f, 0x8b}):
		z, err := gzip.NewReader(b)
		if err != nil {
			return nil, fmt.Errorf("gunzip: %w", err)
		}
		return z, nil
	case bytes.HasPrefix(head, []byte{0x28, 0xb5, 0x2f, 0xfd}):
		z, err := zstd.NewReader(b, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(maxWindow))
		if err != nil {
			return nil, fmt.Errorf("unzstd: %w", err)
		}
		return z.IOReadCloser(), nil
	}
	return io.NopCloser(b), nil
}

// mkdirTemp creates a new temporary folder in dir, with a folder "fs" in it, and returns the path
// of "fs". Mode and owner of "fs" can be set freely, because only root can access the outer folder.
func mkdirTemp(dir, pattern string) (string, error) {
	outer, err := os.MkdirTemp(dir, pattern)
	if err != nil {
		return "", err
	}
	inner := filepath.Join(outer, "fs")
	if err := os.Mkdir(inner, 0o755); err != nil {
		return "", err
	}
	return inner, os.Chmod(inner, 0o755)
}

// replaceFolder moves the folder from, which mkdirTemp created, to the path to. It removes the
// previous content of to, and the temporary parent folder of from.
func replaceFolder(from, to string) error {
	if err := safepath.RemoveAll(to); err != nil {
		return err
	}
	if err := os.Rename(from, to); err != nil {
		return err
	}
	return safepath.RemoveAll(filepath.Dir(from))
}
