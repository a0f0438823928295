package image

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/match"
	"github.com/google/go-containerregistry/pkg/v1/partial"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/durable"
	"keelson.dev/keelson/internal/safepath"
)

// The annotations of an OCI index in which tools store the name of an image.
const (
	nameAnnotation = "io.containerd.image.name"
	refAnnotation  = "org.opencontainers.image.ref.name"
)

// importFolder imports all image archives in the folder Config.Archives. It logs the error of an
// unusable archive and continues.
func (s *Store) importFolder(ctx context.Context) {
	if s.cfg.Archives == "" {
		return
	}
	entries, err := os.ReadDir(s.cfg.Archives)
	if errors.Is(err, os.ErrNotExist) {
		return
	}
	if err != nil {
		s.log.Error("the archives folder could not be read", "error", err)
		return
	}
	done := map[string]archiveMark{}
	_ = durable.ReadJSON(s.storePath("archives.json"), &done)
	changed := false
	for _, e := range entries {
		if e.IsDir() || strings.HasPrefix(e.Name(), ".") || ctx.Err() != nil {
			continue
		}
		file := filepath.Join(s.cfg.Archives, e.Name())
		mark, err := s.importIfNeeded(ctx, file, done[e.Name()], done)
		if err != nil {
			s.log.Error("an archive could not be imported", "archive", file, "error", err)
			continue
		}
		if done[e.Name()] != mark {
			done[e.Name()], changed = mark, true
		}
	}
	if changed {
		if err := saveJSON(s.storePath("archives.json"), done); err != nil {
			s.log.Warn("archives will be imported again at the next start", "error", err)
		}
	}
}

// importIfNeeded imports the archive file unless all its images are in the store, and returns the
// archive's mark. lastMark is the mark of an earlier start. An archive that was touched, copied or
// renamed is recognized by its digest in marks, the marks of all archives.
func (s *Store) importIfNeeded(ctx context.Context, file string, lastMark archiveMark,
	marks map[string]archiveMark) (archiveMark, error) {
	st, err := os.Stat(file)
	if err != nil {
		return archiveMark{}, err
	}
	mark := archiveMark{Size: st.Size(), Time: st.ModTime().UnixNano()}
	if lastMark.Digest != "" && lastMark.Size == mark.Size && lastMark.Time == mark.Time && s.hasAll(lastMark.IDs) {
		return lastMark, nil
	}
	if mark.Digest, err = fileDigest(ctx, file); err != nil {
		return archiveMark{}, err
	}
	for _, m := range marks {
		if m.Digest == mark.Digest && s.hasAll(m.IDs) {
			mark.IDs = m.IDs
			return mark, nil
		}
	}
	names, err := s.importArchive(ctx, file)
	if err != nil {
		return archiveMark{}, err
	}
	s.imported.Add(1)
	s.log.Info("archive imported", "archive", file, "images", names)
	mark.IDs = s.idsOf(names)
	return mark, nil
}

// archiveMark records which images an imported archive contains, so that it is not imported again.
// IDs are the IDs of its images, separated by commas. Marks are stored in archives.json.
type archiveMark struct {
	Size   int64  `json:"Size"`
	Time   int64  `json:"Time"` // modification time in ns since 1970
	Digest string `json:"Digest"`
	IDs    string `json:"IDs"`
}

func fileDigest(ctx context.Context, file string) (string, error) {
	f, err := os.Open(file)
	if err != nil {
		return "", err
	}
	defer f.Close()
	sum := sha256.New()
	for {
		if _, err := io.CopyN(sum, f, 16<<20); err == io.EOF {
			return "sha256:" + hex.EncodeToString(sum.Sum(nil)), nil
		} else if err != nil {
			return "", err
		}
		if ctx.Err() != nil {
			return "", ctx.Err()
		}
	}
}

func (s *Store) idsOf(names []string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var ids []string
	for _, n := range names {
		if id, ok := s.names[n]; ok {
			ids = append(ids, id)
		} else {
			ids = append(ids, n) // the image has no name, only an ID
		}
	}
	slices.Sort(ids)
	return strings.Join(slices.Compact(ids), ",")
}

func (s *Store) hasAll(ids string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, id := range strings.Split(ids, ",") {
		if s.images[id] == nil {
			return false
		}
	}
	return true
}

// Import loads the images of an OCI layout or Docker archive (a tar file) into the store and
// returns their names. It implements agent.Images.
func (s *Store) Import(ctx context.Context, file string) ([]string, error) {
	if err := s.awaitReady(ctx); err != nil {
		return nil, err
	}
	return s.importArchive(ctx, file)
}

func (s *Store) importArchive(ctx context.Context, file string) ([]string, error) {
	tmp, err := mkdirTemp(s.storePath("tmp"), "archive-")
	if err != nil {
		return nil, err
	}
	defer safepath.RemoveAll(filepath.Dir(tmp))
	if err := extractArchive(ctx, file, tmp, s.layers.limits); err != nil {
		return nil, fmt.Errorf("%w: archive %s: %w", agent.ErrImageUnpack, file, err)
	}
	var found []archiveImage
	if _, e := os.Stat(filepath.Join(tmp, "index.json")); e == nil {
		found, err = fromLayout(tmp)
	} else if _, e := os.Stat(filepath.Join(tmp, "manifest.json")); e == nil {
		found, err = fromDocker(file)
	} else {
		err = errors.New("it is neither an OCI layout (index.json) nor a docker archive (manifest.json)")
	}
	if err != nil {
		return nil, fmt.Errorf("%w: archive %s: %w", agent.ErrImageUnpack, file, err)
	}
	var all []string
	for _, f := range found {
		names, err := f.normalizedNames()
		if err != nil {
			return nil, fmt.Errorf("archive %s: %w", file, err)
		}
		what := file
		if len(names) > 0 {
			what = names[0]
		}
		id, err := s.storeImage(ctx, what, f.image, names)
		if err != nil {
			if !errors.Is(err, agent.ErrImageUnpack) {
				err = fmt.Errorf("%w: image %s: %w", agent.ErrImageUnpack, what, err)
			}
			return nil, fmt.Errorf("archive %s: %w", file, err)
		}
		if len(names) == 0 {
			names = []string{id}
		}
		all = append(all, names...)
	}
	return all, nil
}

// archiveImage is an image that an archive contains, with its names.
type archiveImage struct {
	image v1.Image
	names []string
	index string // digest of the manifest or index with these names
}

// normalizedNames returns the image's normalized names, and the name of its digest in each
// repository.
func (n archiveImage) normalizedNames() ([]string, error) {
	var out []string
	for _, s := range n.names {
		r, err := parseReference(s)
		if err != nil {
			return nil, err
		}
		out = append(out, r.String())
		if n.index != "" {
			out = append(out, r.repositoryName()+"@"+n.index)
		}
	}
	slices.Sort(out)
	return slices.Compact(out), nil
}

// extractArchive writes the regular files of the tar archive file to the folder dir. It returns an
// error if their number or size exceeds the limits.
func extractArchive(ctx context.Context, file, dir string, limits Limits) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	stream, err := newDecompressor(f)
	if err != nil {
		return err
	}
	defer stream.Close()
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	m := archiveMeter{limits: limits, dir: dir}
	t := tar.NewReader(&boundedReader{stream, limits.archiveBytes()})
	for ctx.Err() == nil {
		h, err := t.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read the archive: %w", err)
		}
		if err := m.countEntry(h.Name, h.Linkname); err != nil {
			return fmt.Errorf("entry %.200q: %w", h.Name, err)
		}
		if h.Typeflag != tar.TypeReg {
			continue
		}
		name := path.Clean("/" + h.Name)[1:]
		if err := root.MkdirAll(path.Dir(name), 0o700); err != nil {
			return fmt.Errorf("entry %q: %w", h.Name, err)
		}
		out, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
		if err != nil {
			return fmt.Errorf("entry %q: %w", h.Name, err)
		}
		err = m.copyContent(out, t, h.Size)
		if e := out.Close(); err == nil {
			err = e
		}
		if err != nil {
			return fmt.Errorf("entry %q: %w", h.Name, err)
		}
	}
	return ctx.Err()
}

// fromLayout returns the images for this node's platform in the OCI layout in the folder dir.
func fromLayout(dir string) ([]archiveImage, error) {
	index, err := layout.ImageIndexFromPath(dir)
	if err != nil {
		return nil, fmt.Errorf("read the layout: %w", err)
	}
	m, err := index.IndexManifest()
	if err != nil {
		return nil, fmt.Errorf("read the index: %w", err)
	}
	byDigest := map[string]*archiveImage{}
	var order []string
	for _, d := range m.Manifests {
		key := d.Digest.String()
		n := byDigest[key]
		if n == nil {
			img, err := layoutImage(index, d)
			if err != nil {
				return nil, fmt.Errorf("manifest %s: %w", key, err)
			}
			if img == nil {
				continue
			}
			n = &archiveImage{image: img, index: key}
			byDigest[key] = n
			order = append(order, key)
		}
		if v := d.Annotations[nameAnnotation]; v != "" {
			n.names = append(n.names, v)
		} else if v := d.Annotations[refAnnotation]; strings.ContainsAny(v, "/:") {
			n.names = append(n.names, v) // some tools write only a tag here, which is not a name
		}
	}
	var out []archiveImage
	for _, key := range order {
		out = append(out, *byDigest[key])
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("it contains no image for platform %s", nodePlatform())
	}
	return out, nil
}

// layoutImage returns the image that the descriptor d in an OCI index refers to. It returns nil for
// another platform, or if d does not refer to an image.
func layoutImage(index v1.ImageIndex, d v1.Descriptor) (v1.Image, error) {
	switch {
	case d.MediaType.IsIndex():
		sub, err := index.ImageIndex(d.Digest)
		if err != nil {
			return nil, err
		}
		images, err := partial.FindImages(sub, match.Platforms(v1.Platform{OS: nodePlatform().OS,
			Architecture: nodePlatform().Architecture}, nodePlatform()))
		if err != nil || len(images) == 0 {
			return nil, err
		}
		return images[0], nil
	case d.MediaType.IsImage():
		if d.Platform != nil &&
			(d.Platform.OS != nodePlatform().OS || d.Platform.Architecture != nodePlatform().Architecture) {
			return nil, nil
		}
		return index.Image(d.Digest)
	}
	return nil, nil
}

// fromDocker returns the images in an archive of 'docker save'.
func fromDocker(file string) ([]archiveImage, error) {
	opener := func() (io.ReadCloser, error) {
		f, err := os.Open(file)
		if err != nil {
			return nil, err
		}
		plain, err := newDecompressor(f)
		if err != nil {
			f.Close()
			return nil, err
		}
		return bothClosed{plain, f}, nil
	}
	m, err := tarball.LoadManifest(opener)
	if err != nil {
		return nil, fmt.Errorf("read manifest.json: %w", err)
	}
	var out []archiveImage
	for _, d := range m {
		if len(d.RepoTags) == 0 {
			if len(m) > 1 {
				continue // without a name it could not be used
			}
			img, err := tarball.Image(opener, nil)
			if err != nil {
				return nil, err
			}
			out = append(out, archiveImage{image: img})
			continue
		}
		tag, err := dockerTag(d.RepoTags[0])
		if err != nil {
			return nil, err
		}
		img, err := tarball.Image(opener, tag)
		if err != nil {
			return nil, fmt.Errorf("image %s: %w", d.RepoTags[0], err)
		}
		out = append(out, archiveImage{image: img, names: d.RepoTags})
	}
	if len(out) == 0 {
		return nil, errors.New("it contains no image")
	}
	return out, nil
}

// bothClosed is a decompressor that also closes the compressed file when it is closed.
type bothClosed struct {
	io.ReadCloser
	file *os.File
}

func (b bothClosed) Close() error { return errors.Join(b.ReadCloser.Close(), b.file.Close()) }
