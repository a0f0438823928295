package image

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"runtime"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
)

// PullImage pulls an image from a mirror or its registry, and returns the image's ID. Concurrent
// pulls of one image with the same credentials are merged. It implements agent.Images.
func (s *Store) PullImage(ctx context.Context, q *cri.PullImageRequest) (*cri.PullImageResponse, error) {
	if err := s.awaitReady(ctx); err != nil {
		return nil, err
	}
	ref, err := parseReference(q.GetImage().GetImage())
	if err != nil {
		return nil, err
	}
	key := ref.String() + "\x00" + q.GetAuth().String()
	for {
		done := s.pulls.DoChan(key, func() (any, error) { return s.pullImage(ctx, ref, q.GetAuth()) })
		select {
		case r := <-done:
			if r.Err != nil {
				// The context of the merged pull ended, but that of this caller did not.
				if r.Shared && ctx.Err() == nil &&
					(errors.Is(r.Err, context.Canceled) || errors.Is(r.Err, context.DeadlineExceeded)) {
					continue
				}
				return nil, r.Err
			}
			return &cri.PullImageResponse{ImageRef: r.Val.(string)}, nil
		case <-ctx.Done():
			return nil, fmt.Errorf("%w: image %s: %w", agent.ErrImagePull, ref, ctx.Err())
		}
	}
}

// pullImage pulls the image ref from the first mirror that has it, or else from the registry
// itself. It returns the image's ID.
func (s *Store) pullImage(ctx context.Context, ref reference, auth *cri.AuthConfig) (id string, err error) {
	if ref.digest != "" { // the content of a digest cannot change
		s.mu.Lock()
		id := s.names[ref.String()]
		if im := s.images[id]; im != nil {
			s.markUsed(im)
		}
		s.mu.Unlock()
		if id != "" {
			return id, nil
		}
	}
	var errs []error
	for _, host := range append(s.registry.mirrorsOf(ref.registry), ref.registry) {
		credentials := auth
		if host != ref.registry {
			credentials = nil // credentials are for the registry only
		}
		id, err := s.pullFrom(ctx, host, ref, credentials)
		if err == nil {
			return id, nil
		}
		if errors.Is(err, agent.ErrImageUnpack) || ctx.Err() != nil {
			return "", err
		}
		errs = append(errs, fmt.Errorf("registry %s: %w", host, err))
	}
	return "", fmt.Errorf("%w: image %s: %w", agent.ErrImagePull, ref, errors.Join(errs...))
}

func (s *Store) pullFrom(ctx context.Context, host string, ref reference, auth *cri.AuthConfig) (string, error) {
	d, err := s.registry.fetchManifest(ctx, host, ref, auth)
	if err != nil {
		return "", err
	}
	byDigest := ref.repositoryName() + "@" + d.Digest.String()
	names := []string{byDigest}
	if ref.tag != "" {
		names = append(names, ref.String())
	}
	s.mu.Lock()
	if im := s.images[s.names[byDigest]]; im != nil {
		err := s.addNames(im, names...)
		s.markUsed(im)
		s.mu.Unlock()
		return im.ID, err
	}
	s.mu.Unlock()
	img, err := d.Image()
	if err != nil {
		return "", fmt.Errorf("the manifest has no image for platform %s: %w", nodePlatform(), err)
	}
	return s.storeImage(ctx, ref.String(), img, names)
}

// storeImage unpacks the layers of an image and adds the image to the store under names. It returns
// the image's ID. imageName is for errors.
func (s *Store) storeImage(ctx context.Context, imageName string, img v1.Image, names []string) (string, error) {
	if err := checkDigests(img); err != nil {
		return "", fmt.Errorf("%w: image %s: %w", agent.ErrImageUnpack, imageName, err)
	}
	id, err := img.ConfigName()
	if err != nil {
		return "", fmt.Errorf("read the config: %w", err)
	}
	config, err := img.ConfigFile()
	if err != nil {
		return "", fmt.Errorf("read the config: %w", err)
	}
	if config.OS != "" && config.OS != "linux" {
		return "", fmt.Errorf("%w: image %s is for %s", agent.ErrImageUnpack, imageName, config.OS)
	}
	if config.Architecture != "" && config.Architecture != runtime.GOARCH {
		return "", fmt.Errorf("%w: image %s is for %s, this node is %s", agent.ErrImageUnpack, imageName,
			config.Architecture, runtime.GOARCH)
	}
	layers, err := img.Layers()
	if err != nil {
		return "", fmt.Errorf("read the list of layers: %w", err)
	}
	if len(layers) != len(config.RootFS.DiffIDs) {
		return "", fmt.Errorf("%w: image %s has %d layers, but its config lists %d", agent.ErrImageUnpack, imageName,
			len(layers), len(config.RootFS.DiffIDs))
	}
	chain := chainIDs(config.RootFS.DiffIDs)
	im := &imageRecord{ID: id.String(), config: config}
	for _, c := range chain {
		im.Layers = append(im.Layers, layerKey(c))
	}
	s.holdLayers(im.Layers, 1)
	defer s.holdLayers(im.Layers, -1)
	if err := s.layers.unpackAll(ctx, imageName, layers, config.RootFS.DiffIDs, chain); err != nil {
		return "", err
	}
	if im.Size, err = compressedSize(img); err != nil {
		return "", err
	}
	return im.ID, s.publishImage(img, im, names)
}

// checkDigests returns an error if the manifest or the config of an image does not match its
// digest. The registry library does not verify these digests for images from archives.
func checkDigests(img v1.Image) error {
	digest, err := img.Digest()
	if err != nil {
		return err
	}
	m, err := img.Manifest()
	if err != nil {
		return fmt.Errorf("read the manifest: %w", err)
	}
	// With size -1, the library would read a config without a bound.
	if m.Config.Size > maxConfig || m.Config.Size < 0 {
		return fmt.Errorf("%w: the config has %d bytes", errLimit, m.Config.Size)
	}
	if len(m.Layers) > maxLayers {
		return fmt.Errorf("%w: %d layers, at most %d can be mounted", errLimit, len(m.Layers), maxLayers)
	}
	for _, c := range []struct {
		what string
		want v1.Hash
		read func() ([]byte, error)
	}{{"manifest", digest, img.RawManifest}, {"config", m.Config.Digest, img.RawConfigFile}} {
		data, err := c.read()
		if err != nil {
			return fmt.Errorf("read the %s: %w", c.what, err)
		}
		if got := sha256.Sum256(data); hex.EncodeToString(got[:]) != c.want.Hex {
			return fmt.Errorf("the %s is sha256:%x, not %s", c.what, got, c.want)
		}
	}
	return nil
}

func compressedSize(img v1.Image) (int64, error) {
	m, err := img.Manifest()
	if err != nil {
		return 0, fmt.Errorf("read the manifest: %w", err)
	}
	size := m.Config.Size
	for _, l := range m.Layers {
		size += l.Size
	}
	return size, nil
}

// holdLayers adds n, which may be negative, to the number of pulls that will use each of the
// layers. Layers with a number above 0 are not removed.
func (s *Store) holdLayers(keys []string, n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, k := range keys {
		if s.busy[k] += n; s.busy[k] == 0 {
			delete(s.busy, k)
		}
	}
}

// publishImage writes the folder of an image on disk, and adds the image to the store under names.
func (s *Store) publishImage(img v1.Image, im *imageRecord, names []string) error {
	config, err := img.RawConfigFile()
	if err != nil {
		return err
	}
	manifest, err := img.RawManifest()
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if have := s.images[im.ID]; have != nil {
		s.markUsed(have)
		return s.addNames(have, names...)
	}
	tmp, err := mkdirTemp(s.storePath("tmp"), "image-")
	if err != nil {
		return err
	}
	for file, data := range map[string][]byte{"config.json": config, "manifest.json": manifest} {
		if err := saveFile(tmp+"/"+file, data); err != nil {
			return err
		}
	}
	if err := saveJSON(tmp+"/image.json", im); err != nil {
		return err
	}
	if err := replaceFolder(tmp, s.storePath("images", hexOf(im.ID))); err != nil {
		return err
	}
	s.images[im.ID] = im
	s.markUsed(im)
	return s.addNames(im, names...)
}

// repoNames splits the names of an image into names with a tag and names with a digest.
func repoNames(names []string) (tags, digests []string) {
	for _, n := range names {
		if strings.Contains(n, "@") {
			digests = append(digests, n)
		} else {
			tags = append(tags, n)
		}
	}
	return tags, digests
}
