package fake

import (
	"context"
	"fmt"
	"strings"
	"sync"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
)

// Images simulates an image store in which every image can be pulled, unless the Script makes the
// pull fail. It implements agent.Images.
type Images struct {
	Script
	Clock Clock

	mu      sync.Mutex
	present map[string]agent.ImageConfig
}

var _ agent.Images = (*Images)(nil)

// Put adds an image with the given configuration to the store.
func (i *Images) Put(image string, c agent.ImageConfig) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.present == nil {
		i.present = map[string]agent.ImageConfig{}
	}
	if c.ID == "" {
		c.ID = "sha256:" + image
	}
	i.present[image] = c
}

// PullImage adds an image with an empty config to the store, unless the store already has the
// image. It implements agent.Images.
func (i *Images) PullImage(ctx context.Context, q *cri.PullImageRequest) (*cri.PullImageResponse, error) {
	name := q.GetImage().GetImage()
	if err := i.enterVerb(ctx, i.Clock, "PullImage", strings.TrimSpace(name+" "+q.GetAuth().GetUsername())); err !=
		nil {
		return nil, err
	}
	if c, err := i.Config(ctx, name); err == nil {
		return &cri.PullImageResponse{ImageRef: c.ID}, nil
	}
	i.Put(name, agent.ImageConfig{})
	return &cri.PullImageResponse{ImageRef: "sha256:" + name}, nil
}

// ImageStatus returns the status of an image in the store. It implements agent.Images.
func (i *Images) ImageStatus(_ context.Context, q *cri.ImageStatusRequest) (*cri.ImageStatusResponse, error) {
	if strings.Contains(q.GetImage().GetImage(), " ") {
		return nil, fmt.Errorf("%w: %q", agent.ErrInvalidImage, q.GetImage().GetImage())
	}
	c, err := i.Config(context.Background(), q.GetImage().GetImage())
	if err != nil {
		return &cri.ImageStatusResponse{}, nil
	}
	return &cri.ImageStatusResponse{Image: &cri.Image{Id: c.ID, RepoTags: []string{q.Image.Image}, Size: 1 << 20}}, nil
}

// ListImages returns the images in the store. It implements agent.Images.
func (i *Images) ListImages(context.Context, *cri.ListImagesRequest) (*cri.ListImagesResponse, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	out := &cri.ListImagesResponse{}
	for name, c := range i.present {
		out.Images = append(out.Images, &cri.Image{Id: c.ID, RepoTags: []string{name}, Size: 1 << 20})
	}
	return out, nil
}

// RemoveImage removes an image from the store. It implements agent.Images.
func (i *Images) RemoveImage(_ context.Context, q *cri.RemoveImageRequest) (*cri.RemoveImageResponse, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	delete(i.present, q.GetImage().GetImage())
	return &cri.RemoveImageResponse{}, nil
}

// ImageFsInfo returns an empty response. It implements agent.Images.
func (i *Images) ImageFsInfo(context.Context, *cri.ImageFsInfoRequest) (*cri.ImageFsInfoResponse, error) {
	return &cri.ImageFsInfoResponse{}, nil
}

// Config returns the config of an image in the store. It implements agent.Images.
func (i *Images) Config(_ context.Context, image string) (agent.ImageConfig, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if c, ok := i.present[image]; ok {
		return c, nil
	}
	for _, c := range i.present {
		if c.ID == image {
			return c, nil
		}
	}
	return agent.ImageConfig{}, fmt.Errorf("%w: %s", agent.ErrImageNotPresent, image)
}

// PrepareRootFS returns the path of a root file system that does not exist. It implements
// agent.Images.
func (i *Images) PrepareRootFS(_ context.Context, id, _ string) (agent.RootFS, error) {
	return agent.RootFS{Path: "/fake/rootfs/" + id, Mounted: true}, nil
}

// RemoveRootFS does nothing. It implements agent.Images.
func (i *Images) RemoveRootFS(context.Context, string) error { return nil }

// Import adds an image with the name path to the store, and returns that name. It implements
// agent.Images.
func (i *Images) Import(_ context.Context, path string) ([]string, error) {
	i.Put(path, agent.ImageConfig{})
	return []string{path}, nil
}
