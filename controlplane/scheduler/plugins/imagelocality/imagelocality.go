// Package imagelocality is the Score plugin ImageLocality. It prefers nodes that already have the
// pod's container images.
package imagelocality

import (
	"context"
	"strings"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// Name is the name of the plugin in a KubeSchedulerConfiguration.
const Name = "ImageLocality"

// Bounds for the total size, in bytes, of those images of the pod that a node has. Below
// minImageSize the score is 0. From maxContainerImageSize per container it is the maximum.
const (
	minImageSize          = 23 << 20
	maxContainerImageSize = 1000 << 20
)

// Plugin gives a higher score to nodes that already have the pod's container images.
type Plugin struct{}

// Name implements framework.Plugin: it returns the name of the plugin.
func (Plugin) Name() string { return Name }

// state is the result of PreScore: for each image of the pod, the fraction of the nodes that have
// it. An image that few nodes have counts less in the score, so that pods do not concentrate on
// these nodes.
type state struct {
	images map[string]float64
	count  int64
}

// PreScore implements framework.PreScore: it computes the state for Score. It returns Skip if no
// node has any of the pod's images.
func (Plugin) PreScore(_ context.Context, c *framework.Cycle, nodes []*framework.NodeInfo) *framework.Status {
	st := &state{images: make(map[string]float64)}
	var held bool
	for _, list := range [][]v1.Container{c.Pod.Pod.Spec.InitContainers, c.Pod.Pod.Spec.Containers} {
		for i := range list {
			st.count++
			name := withDefaultTag(list[i].Image)
			if _, seen := st.images[name]; seen {
				continue
			}
			holders := 0
			for _, n := range nodes {
				if _, ok := n.Images[name]; ok {
					holders++
				}
			}
			st.images[name] = float64(holders) / float64(len(nodes))
			held = held || holders > 0
		}
	}
	if !held {
		return framework.SkipStatus
	}
	c.Put(Name, st)
	return nil
}

// withDefaultTag returns the image reference with the tag "latest" if it has neither a tag nor a
// digest.
func withDefaultTag(image string) string {
	if strings.LastIndex(image, ":") <= strings.LastIndex(image, "/") && !strings.Contains(image, "@") {
		return image + ":latest"
	}
	return image
}

// Score implements framework.Score: it returns a score for the total size of the pod's images that
// the node has. The size of each image is multiplied by the fraction of the nodes that have the
// image.
func (Plugin) Score(_ context.Context, c *framework.Cycle, n *framework.NodeInfo) (int64, *framework.Status) {
	st, ok := c.Get(Name).(*state)
	if !ok {
		return 0, nil
	}
	var sum int64
	for name, share := range st.images {
		sum += int64(float64(n.Images[name]) * share)
	}
	top := maxContainerImageSize * st.count
	switch {
	case sum < minImageSize:
		return 0, nil
	case sum >= top:
		return framework.MaxScore, nil
	}
	return framework.MaxScore * (sum - minImageSize) / (top - minImageSize), nil
}
