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

// client is a node whose pods have volumes of a server.
type client struct {
	*testing.T
	volumes *Volumes
	cluster *fake.Cluster
}

// fails says why a pod does not get its volume, of which nothing is left.
func (c *client) fails(p *v1.Pod, want ...string) {
	c.Helper()
	start := time.Now()
	_, err := c.volumes.MountAll(c.Context(), p)
	for _, w := range want {
		if err == nil || !strings.Contains(err.Error(), w) {
			c.Errorf("mounting: %v, want %q", err, w)
		}
	}
	c.Logf("after %s: %v", time.Since(start).Round(time.Millisecond), err)
	c.gone(p.UID)
}

// gone takes the volumes of a pod away, which leaves nothing of it.
func (c *client) gone(uid types.UID) {
	c.Helper()
	start := time.Now()
	for range 2 {
		must(c.T, c.volumes.UnmountAll(context.Background(), uid))
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
