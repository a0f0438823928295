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
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/klauspost/compress/zstd"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/singleflight"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/durable"
	"keelson.dev/keelson/internal/safepath"
)

// parallelLayers is how many layers of an image are fetched concurrently at most.
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

// layerUnpacker fetches and unpacks the layers of images into a folder of the store. Concurrent
// requests for one layer are merged. It is safe for concurrent use.
type layerUnpacker struct {
	dir       string // folder of the unpacked layers
	tmp       string // temporary folder in the same file system
	limits    Limits
	merged    singleflight.Group // by chain ID
	unpacking chan struct{}      // one slot per image that is being unpacked
}

func newLayerUnpacker(dir, tmp string, limits Limits) *layerUnpacker {
	return &layerUnpacker{dir: dir, tmp: tmp, limits: limits, unpacking: make(chan struct{}, limits.Images)}
}

// layerPath returns the folder of the unpacked layer with a chain ID.
func (l *layerUnpacker) layerPath(chainID string) string {
	return filepath.Join(l.dir, layerKey(chainID))
}

// unpackAll fetches and unpacks all missing layers of an image concurrently. A layer is finished
// after all layers below it. imageName is for errors. diffs and chain are the diff IDs and the
// chain IDs of layers.
func (l *layerUnpacker) unpackAll(
	ctx context.Context, imageName string, layers []v1.Layer, diffs []v1.Hash, chain []string,
) error {
	leave, err := l.acquireUnpackSlot(ctx)
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
			below = append(below, l.layerPath(chain[j]))
		}
		g.Go(func() error {
			_, err, _ := l.merged.Do(chain[i], func() (any, error) {
				return nil, l.unpackLayer(ctx, layers[i], diffs[i], chain[i], below, finished[:i])
			})
			if err != nil {
				digest, _ := layers[i].Digest()
				if errors.Is(err, errFetch) || ctx.Err() != nil {
					return fmt.Errorf("layer %d (%s): %w", i+1, digest, err)
				}
				return fmt.Errorf("%w: image %s, layer %d of %d (%s): %w", agent.ErrImageUnpack, imageName, i+1,
					len(layers), digest, err)
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

// fetchReader is an io.Reader that wraps its errors in errFetch.
type fetchReader struct{ io.Reader }

func (f fetchReader) Read(p []byte) (int, error) {
	n, err := f.Reader.Read(p)
	if err != nil && err != io.EOF {
		err = fmt.Errorf("%w: %w", errFetch, err)
	}
	return n, err
}

func (l *layerUnpacker) unpackLayer(
	ctx context.Context, layer v1.Layer, diff v1.Hash, chainID string, below []string, belowDone []chan struct{},
) error {
	final := l.layerPath(chainID)
	if _, err := os.Stat(final); err == nil {
		return nil
	}
	tmp, err := mkdirTemp(l.tmp, "layer-")
	if err != nil {
		return err
	}
	defer safepath.RemoveAll(filepath.Dir(tmp))
	blob, err := layer.Compressed()
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
	u, err := newUnpacker(tmp, l.limits)
	if err != nil {
		return err
	}
	defer u.closeRoot()
	whole := io.TeeReader(&boundedReader{tar, l.limits.archiveBytes()}, sum)
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

// acquireUnpackSlot waits until fewer than Limits.Images images are being unpacked. The caller must
// call leave when its image is unpacked.
func (l *layerUnpacker) acquireUnpackSlot(ctx context.Context) (leave func(), err error) {
	select {
	case l.unpacking <- struct{}{}:
		return func() { <-l.unpacking }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// layerSizes returns the size of each unpacked layer by its key. A layer with an unreadable record
// is missing from the result and counts as 0.
func (l *layerUnpacker) layerSizes() map[string]diskSpace {
	out := map[string]diskSpace{}
	entries, _ := os.ReadDir(l.dir)
	for _, e := range entries {
		var r layerRecord
		if key, ok := strings.CutSuffix(e.Name(), ".json"); ok &&
			durable.ReadJSON(filepath.Join(l.dir, e.Name()), &r) == nil {
			out[key] = diskSpace{r.Bytes, r.Inodes}
		}
	}
	return out
}

// maxWindow is the maximum memory for the window of a zstd decompressor, in bytes. It is the window
// size of zstd's highest compression level.
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

// replaceFolder moves the folder source, which mkdirTemp created, to the path target. It removes
// the previous content of target, and the temporary parent folder of source.
func replaceFolder(source, target string) error {
	if err := safepath.RemoveAll(target); err != nil {
		return err
	}
	if err := os.Rename(source, target); err != nil {
		return err
	}
	return safepath.RemoveAll(filepath.Dir(source))
}
