package image

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/durable"
)

func dockerTag(s string) (*name.Tag, error) {
	t, err := name.NewTag(s)
	if err != nil {
		return nil, fmt.Errorf("%w: %q: %w", agent.ErrInvalidImage, s, err)
	}
	return &t, nil
}

// ImageStatus returns the status of an image. The field Image of the response is nil if the store
// does not have the image. It implements agent.Images.
func (s *Store) ImageStatus(ctx context.Context, q *cri.ImageStatusRequest) (*cri.ImageStatusResponse, error) {
	if err := s.awaitReady(ctx); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if im := s.images[s.lookupID(q.GetImage().GetImage())]; im != nil {
		s.markUsed(im) // the caller is about to create a container with it
		return &cri.ImageStatusResponse{Image: im.toCRI()}, nil
	}
	return &cri.ImageStatusResponse{}, nil
}

func (im *imageRecord) toCRI() *cri.Image {
	tags, digests := repoNames(im.Names)
	out := &cri.Image{Id: im.ID, RepoTags: tags, RepoDigests: digests, Size: uint64(im.Size),
		Spec: &cri.ImageSpec{Image: im.ID}}
	user, _, _ := strings.Cut(im.config.Config.User, ":")
	if uid, err := strconv.ParseInt(user, 10, 64); err == nil {
		out.Uid = &cri.Int64Value{Value: uid}
	} else {
		out.Username = user
	}
	if user == "" {
		out.Uid = &cri.Int64Value{Value: 0}
	}
	return out
}

// ListImages returns the images in the store. It implements agent.Images.
func (s *Store) ListImages(ctx context.Context, q *cri.ListImagesRequest) (*cri.ListImagesResponse, error) {
	if err := s.awaitReady(ctx); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	out := &cri.ListImagesResponse{}
	if want := q.GetFilter().GetImage().GetImage(); want != "" {
		if im := s.images[s.lookupID(want)]; im != nil {
			out.Images = append(out.Images, im.toCRI())
		}
		return out, nil
	}
	for _, im := range s.images {
		out.Images = append(out.Images, im.toCRI())
	}
	slices.SortFunc(out.Images, func(a, b *cri.Image) int { return cmp.Compare(a.Id, b.Id) })
	return out, nil
}

// RemoveImage removes an image from the store. Layers that containers use stay until the containers
// are removed. It succeeds if the image does not exist. It implements agent.Images.
func (s *Store) RemoveImage(ctx context.Context, q *cri.RemoveImageRequest) (*cri.RemoveImageResponse, error) {
	if err := s.awaitReady(ctx); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	im := s.images[s.lookupID(q.GetImage().GetImage())]
	if im == nil {
		return &cri.RemoveImageResponse{}, nil
	}
	if err := s.trash.deleteInBackground(s.storePath("images", hexOf(im.ID))); err != nil {
		return nil, fmt.Errorf("remove image %s: %w", im.ID, err)
	}
	delete(s.images, im.ID)
	maps.DeleteFunc(s.names, func(_, id string) bool { return id == im.ID })
	if err := s.removeUnusedLayers(); err != nil {
		return nil, fmt.Errorf("remove image %s: %w", im.ID, err)
	}
	return &cri.RemoveImageResponse{}, nil
}

// ImageFsInfo returns the disk usage of all unpacked layers. It reports the same usage for images
// and for containers, which share the file system. It implements agent.Images.
func (s *Store) ImageFsInfo(ctx context.Context, q *cri.ImageFsInfoRequest) (*cri.ImageFsInfoResponse, error) {
	if err := s.awaitReady(ctx); err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(s.storePath("layers"))
	if err != nil {
		return nil, fmt.Errorf("read the layers of the image store: %w", err)
	}
	var bytes, inodes uint64
	for _, e := range entries {
		var l layerRecord
		if strings.HasSuffix(e.Name(), ".json") && durable.ReadJSON(s.storePath("layers", e.Name()), &l) == nil {
			bytes += uint64(l.Bytes)
			inodes += uint64(l.Inodes)
		}
	}
	u := &cri.FilesystemUsage{Timestamp: time.Now().UnixNano(), FsId: &cri.FilesystemIdentifier{Mountpoint: s.cfg.Root},
		UsedBytes: &cri.UInt64Value{Value: bytes}, InodesUsed: &cri.UInt64Value{Value: inodes}}
	return &cri.ImageFsInfoResponse{ImageFilesystems: []*cri.FilesystemUsage{u},
		ContainerFilesystems: []*cri.FilesystemUsage{u}}, nil
}

// Config returns the part of an image's config that containers inherit. It returns
// agent.ErrImageNotPresent if the store does not have the image. It implements agent.Images.
func (s *Store) Config(ctx context.Context, image string) (agent.ImageConfig, error) {
	if err := s.awaitReady(ctx); err != nil {
		return agent.ImageConfig{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	im := s.images[s.lookupID(image)]
	if im == nil {
		return agent.ImageConfig{}, fmt.Errorf("%w: %s", agent.ErrImageNotPresent, image)
	}
	s.markUsed(im)
	c := im.config.Config
	out := agent.ImageConfig{ID: im.ID, Env: c.Env, Entrypoint: c.Entrypoint, Cmd: c.Cmd,
		WorkingDir: c.WorkingDir, User: c.User,
		StopSignal: c.StopSignal, Volumes: slices.Sorted(maps.Keys(c.Volumes))}
	if _, digests := repoNames(im.Names); len(digests) > 0 {
		out.Digest = digests[0]
	}
	return out, nil
}

// PrepareRootFS creates the folders of a container's root file system and returns the parts of its
// overlay. The creator of the container mounts the overlay, so that no mount outlives a container.
// It is idempotent per container. It implements agent.Images.
func (s *Store) PrepareRootFS(ctx context.Context, containerID, image string) (agent.RootFS, error) {
	if err := s.awaitReady(ctx); err != nil {
		return agent.RootFS{}, err
	}
	if containerID == "" || strings.ContainsAny(containerID, "/\x00") || containerID[0] == '.' {
		return agent.RootFS{}, fmt.Errorf("container ID %q is not a valid folder name", containerID)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	c, known := s.containers[containerID]
	if !known {
		im := s.images[s.lookupID(image)]
		if im == nil {
			return agent.RootFS{}, fmt.Errorf("%w: %s", agent.ErrImageNotPresent, image)
		}
		c = containerRecord{Image: im.ID, Layers: im.Layers}
		if err := s.makeContainer(containerID, c); err != nil {
			return agent.RootFS{}, fmt.Errorf("prepare a root file system for container %s: %w", containerID, err)
		}
		s.containers[containerID] = c
		s.markUsed(im)
	}
	dir := s.storePath("containers", containerID)
	fs := agent.RootFS{Path: dir + "/root", Upper: dir + "/upper", Work: dir + "/work"}
	for _, k := range slices.Backward(c.Layers) {
		fs.Lower = append(fs.Lower, s.storePath("layers", k))
	}
	fs.Lower = append(fs.Lower, s.storePath("base"))
	return fs, nil
}

// makeContainer creates the folders of the container with this ID, and then its record. A folder
// without a record is deleted at the next start.
func (s *Store) makeContainer(id string, c containerRecord) error {
	dir := s.storePath("containers", id)
	if err := os.Mkdir(dir, 0o711); errors.Is(err, os.ErrExist) { // left by a failed attempt
		if err = s.trash.deleteInBackground(dir); err == nil {
			err = os.Mkdir(dir, 0o711)
		}
		if err != nil {
			return err
		}
	} else if err != nil {
		return err
	}
	// The upper folder becomes the container's "/", so it gets the owner and mode of the image's
	// root.
	st := unix.Stat_t{Mode: 0o755}
	if len(c.Layers) > 0 {
		if err := unix.Stat(s.storePath("layers", c.Layers[len(c.Layers)-1]), &st); err != nil {
			return err
		}
	}
	for _, d := range []string{"root", "upper", "work"} {
		if err := os.Mkdir(dir+"/"+d, 0o755); err != nil {
			return err
		}
	}
	if err := errors.Join(os.Chown(dir+"/upper", int(st.Uid), int(st.Gid)), unix.Chmod(dir+"/upper", st.Mode&0o7777),
		os.Chmod(dir, 0o711)); err != nil {
		return err
	}
	return saveContainer(s.containerRecordPath(id), c)
}

// RemoveRootFS deletes the root file system of a container. It succeeds if PrepareRootFS was not
// called. It implements agent.Images.
func (s *Store) RemoveRootFS(ctx context.Context, containerID string) error {
	if err := s.awaitReady(ctx); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	c, known := s.containers[containerID]
	if !known {
		return nil
	}
	dir := s.storePath("containers", containerID)
	// The store does not mount it, but a creator of the container may have.
	if err := unix.Unmount(dir+"/root", unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && err != unix.EINVAL &&
		err != unix.ENOENT {
		return fmt.Errorf("unmount the root file system of container %s: %w", containerID, err)
	}
	if err := s.trash.deleteInBackground(dir); err != nil {
		return fmt.Errorf("remove the root file system of container %s: %w", containerID, err)
	}
	if err := os.Remove(s.containerRecordPath(containerID)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove the record of container %s: %w", containerID, err)
	}
	delete(s.containers, containerID)
	if im := s.images[c.Image]; im != nil {
		// The image was in use until now. Its idle time starts at minIdle, so that it can be
		// removed at once if the disk is full.
		if until := s.now().Add(-minIdle); until.After(im.lastUsed) {
			im.lastUsed = until
			s.storeLastUse(im)
		}
		return nil
	}
	return s.removeUnusedLayers() // it may have been the last user of a removed image's layers
}
