// Package imagelocality prefers nodes that already have the pod's images.
package imagelocality

import (
	"context"
	"strings"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// Name is the name of the plugin in a KubeSchedulerConfiguration.
const Name = "ImageLocality"

// Limits for the total size of a pod's images that a node has. If the size is below least bytes,
// the score is 0. If it is at least most bytes for each container, the score is the maximum.
const (
	least = 23 << 20
	most  = 1000 << 20
)

// Plugin gives a higher score to nodes that already have the pod's container images.
type Plugin struct{}

// Name implements framework.Plugin: it returns the name of the plugin.
func (Plugin) Name() string { return Name }

// state is the result of PreScore: for each image of the pod, the share of nodes that have it. An
// image that few nodes have counts less, so that pods do not concentrate on those nodes.
type state struct {
	images map[string]float64
	count  int64
}

// PreScore implements framework.PreScore. It skips scoring if no node has any of the pod's images.
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

// Score implements framework.Score: a score by the sizes of the pod's images on the node, each
// weighted by the share of nodes that have it.
func (Plugin) Score(_ context.Context, c *framework.Cycle, n *framework.NodeInfo) (int64, *framework.Status) {
	st, ok := c.Get(Name).(*state)
	if !ok {
		return 0, nil
	}
	var sum int64
	for name, share := range st.images {
		sum += int64(float64(n.Images[name]) * share)
	}
	top := most * st.count
	switch {
	case sum < least:
		return 0, nil
	case sum >= top:
		return framework.MaxScore, nil
	}
	return framework.MaxScore * (sum - least) / (top - least), nil
}
