package vm

import (
	"errors"
	"fmt"
	"strings"
)

// withTimeoutFlag adds a health timeout for slow machines to an upgrade command.
func withTimeoutFlag(text string) string { return text + " --health-timeout " + soon.String() }

// examplePods returns the UIDs of the example's pods.
func (c *vmCluster) examplePods() (string, error) {
	return c.runKctl("get", "pods", "-l", "app=hello", "--sort-by=.metadata.uid", "-o",
		"jsonpath={.items[*].metadata.uid}")
}

// requireNewer returns an error unless exactly these machines run the newer release.
func (c *vmCluster) requireNewer(names ...string) error {
	is, err := c.runningReleases()
	if err != nil {
		return err
	}
	for name, release := range is {
		newer := strings.TrimPrefix(strings.TrimPrefix(release, "keelson://"), "v") == c.site.version
		want := false
		for _, n := range names {
			want = want || n == name
		}
		if newer != want {
			return fmt.Errorf("%s runs %s: of the newer release %s are to be %v", name, release, c.site.version, names)
		}
	}
	if len(is) != len(hosts) {
		return fmt.Errorf("replicas and nodes are %v", is)
	}
	return nil
}

// upgradeWithDrain upgrades all machines except one replica, and drains the node first.
func (c *vmCluster) upgradeWithDrain() error {
	if err := c.useReadyReplica(); err != nil {
		return err
	}
	before, err := c.examplePods()
	if err != nil {
		return err
	}
	if err := c.runLineFor("w1", "upgrade",
		"kctl cluster upgrade -f cluster.yaml --to keelson-v1.1.0-linux-amd64.tar.gz --dry-run", "site",
		"keelson-v1.1.0-linux-amd64.tar.gz", c.site.tarball); err != nil {
		return err
	}
	if err := c.requireNewer(); err != nil {
		return fmt.Errorf("after a dry run: %w", err)
	}
	text := "kctl cluster upgrade -f cluster.yaml --to ./dist --drain w1,w2 --skip cp3"
	out, err := c.runLine("upgrade", text, "site", "./dist", c.site.nextRelease, "w1,w2", "w1", "--skip cp3",
		withTimeoutFlag("--skip cp3"))
	if err != nil {
		return err
	}
	if err := c.requireNewer("cp1", "cp2", "cp4", "w1"); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	if err := c.awaitExample(); err != nil {
		return err
	}
	after, err := c.examplePods()
	if err != nil {
		return err
	}
	for uid := range strings.FieldsSeq(before) {
		if strings.Contains(after, uid) {
			return fmt.Errorf("pod %s has not left the node: before %s, after %s", uid, before, after)
		}
	}
	// It takes pods again.
	if out, err := c.runKctl("get", "node", "w1", "-o", "jsonpath={.spec.unschedulable}"); err != nil || out != "" {
		return fmt.Errorf("w1 is cordoned: %q (%w)", out, err)
	}
	return c.checkService()
}

// upgradeByHand upgrades the remaining replica without a cluster file, and downgrades the worker.
func (c *vmCluster) upgradeByHand() error {
	if err := c.awaitMembers(c.replicas...); err != nil {
		return err
	}
	if err := c.runLineFor("alarms", "upgrade", "kctl cluster status", "site"); err != nil {
		return err
	}
	if err := c.runLineFor("keelson://", "upgrade", "kctl get nodes -o wide", "site"); err != nil {
		return err
	}
	// The leader is upgraded last: if it is the remaining replica, another replica becomes the
	// leader first.
	if err := awaitCondition(func() error {
		s, err := c.clusterStatus()
		if err == nil && s.Leader == "cp3" {
			err = errors.New("cp3 leads")
			_, err2 := c.runLine("upgrade", "kctl cluster transfer-leader", "site")
			err = errors.Join(err, err2)
		}
		return err
	}); err != nil {
		return err
	}
	if err := c.unpackRelease("cp3", nextRelease); err != nil {
		return err
	}
	if _, err := c.runLine("upgrade", "sudo ./install.sh server --server 192.0.2.12", "cp3"); err != nil {
		return err
	}
	if err := c.awaitMembers(c.replicas...); err != nil {
		return err
	}
	before, err := c.containerProcesses()
	if err != nil {
		return err
	}
	if err := c.unpackRelease("w1", thisRelease); err != nil {
		return err
	}
	if _, err := c.runLine("upgrade", "sudo ./install.sh agent --server 192.0.2.11", "w1"); err != nil {
		return err
	}
	if err := awaitCondition(func() error { return c.requireNewer(c.replicas...) }); err != nil {
		return err
	}
	if err := c.awaitNode(); err != nil {
		return err
	}
	if after, err := c.containerProcesses(); err != nil || after != before {
		return fmt.Errorf("the agent of before left\n%s\nof\n%s (%w)", after, before, err)
	}
	return c.runLineFor("leads now", "upgrade", "kctl cluster transfer-leader", "site")
}

// upgradeRest continues the upgrade with the remaining machine, which is the worker.
func (c *vmCluster) upgradeRest() error {
	if err := c.useReadyReplica(); err != nil {
		return err
	}
	before, err := c.containerProcesses()
	if err != nil {
		return err
	}
	text := "kctl cluster upgrade -f cluster.yaml --to keelson-v1.1.0-linux-amd64.tar.gz"
	if _, err := c.runLine("upgrade", text, "site", "keelson-v1.1.0-linux-amd64.tar.gz",
		withTimeoutFlag(c.site.tarball)); err !=
		nil {
		return err
	}
	if err := c.requireNewer(hosts...); err != nil {
		return err
	}
	if after, err := c.containerProcesses(); err != nil || after != before {
		return fmt.Errorf("the newer agent left\n%s\nof\n%s (%w)", after, before, err)
	}
	return errors.Join(c.awaitExample(), c.checkService())
}
