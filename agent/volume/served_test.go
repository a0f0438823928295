package volume

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/moby/sys/mountinfo"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent/fake"
)

// serverClient is a node whose pods have volumes of a server.
type serverClient struct {
	*testing.T
	volumes *Volumes
	cluster *fake.Cluster
}

// expectMountError expects a mount error with the given texts, and that nothing is left.
func (c *serverClient) expectMountError(p *v1.Pod, want ...string) {
	c.Helper()
	start := time.Now()
	_, err := c.volumes.MountAll(c.Context(), p)
	for _, w := range want {
		if err == nil || !strings.Contains(err.Error(), w) {
			c.Errorf("mounting: %v, want %q", err, w)
		}
	}
	c.Logf("after %s: %v", time.Since(start).Round(time.Millisecond), err)
	c.unmountPod(p.UID)
}

// unmountPod unmounts the volumes of a pod, and expects that nothing is left.
func (c *serverClient) unmountPod(uid types.UID) {
	c.Helper()
	start := time.Now()
	for range 2 {
		requireNoError(c.T, c.volumes.UnmountAll(context.Background(), uid))
	}
	c.Logf("unmounted %s after %s", uid, time.Since(start).Round(time.Millisecond))
	left, err := mountinfo.GetMounts(mountinfo.PrefixFilter(c.volumes.podDir(uid)))
	if err != nil || len(left) > 0 {
		c.Errorf("what is mounted still: %v, %v", left, err)
	}
	if _, err := os.Lstat(c.volumes.podDir(uid)); !errors.Is(err, os.ErrNotExist) {
		c.Errorf("the pod's folder: %v", err)
	}
}
