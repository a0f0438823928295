package vm

import (
	"errors"
	"fmt"
	"strings"
)

// patient is a command line of an upgrade with what a person adds whose machines are slow.
func patient(text string) string { return text + " --health-timeout " + soon.String() }

// pods are the example's, by their UIDs.
func (c *cluster) pods() (string, error) {
	return c.kctl("get", "pods", "-l", "app=hello", "--sort-by=.metadata.uid", "-o", "jsonpath={.items[*].metadata.uid}")
}

// newer says whether these and no others run the newer release.
func (c *cluster) newer(names ...string) error {
	is, err := c.releases()
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

// drainAndSkip brings the next release to all but a replica, and has pods leave their node first.
func (c *cluster) drainAndSkip() error {
	if err := c.ask(); err != nil {
		return err
	}
	before, err := c.pods()
	if err != nil {
		return err
	}
	if err := c.lineSays("w1", "upgrade", "kctl cluster upgrade -f cluster.yaml --to keelson-v1.1.0-linux-amd64.tar.gz --dry-run", "site",
		"keelson-v1.1.0-linux-amd64.tar.gz", c.site.tarball); err != nil {
		return err
	}
	if err := c.newer(); err != nil {
		return fmt.Errorf("after a dry run: %w", err)
	}
	text := "kctl cluster upgrade -f cluster.yaml --to ./dist --drain w1,w2 --skip cp3"
	out, err := c.line("upgrade", text, "site", "./dist", c.site.next, "w1,w2", "w1", "--skip cp3", patient("--skip cp3"))
	if err != nil {
		return err
	}
	if err := c.newer("cp1", "cp2", "cp4", "w1"); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	if err := c.ready(); err != nil {
		return err
	}
	after, err := c.pods()
	if err != nil {
		return err
	}
	for uid := range strings.FieldsSeq(before) {
		if strings.Contains(after, uid) {
			return fmt.Errorf("pod %s has not left the node: before %s, after %s", uid, before, after)
		}
	}
	// It takes pods again.
	if out, err := c.kctl("get", "node", "w1", "-o", "jsonpath={.spec.unschedulable}"); err != nil || out != "" {
		return fmt.Errorf("w1 is cordoned: %q (%w)", out, err)
	}
	return c.serves()
}

// upgradeByHand brings the replica that was left the release as one does without a cluster file, and the worker back to the one before.
func (c *cluster) upgradeByHand() error {
	if err := c.allReady(c.replicas...); err != nil {
		return err
	}
	if err := c.lineSays("alarms", "upgrade", "kctl cluster status", "site"); err != nil {
		return err
	}
	if err := c.lineSays("keelson://", "upgrade", "kctl get nodes -o wide", "site"); err != nil {
		return err
	}
	// The leader is the last: where it is the one that was left, another one leads first.
	if err := until(func() error {
		s, err := c.status()
		if err == nil && s.Leader == "cp3" {
			err = errors.New("cp3 leads")
			_, err2 := c.line("upgrade", "kctl cluster transfer-leader", "site")
			err = errors.Join(err, err2)
		}
		return err
	}); err != nil {
		return err
	}
	if err := c.unpacked("cp3", nextRelease); err != nil {
		return err
	}
	if _, err := c.line("upgrade", "sudo ./install.sh server --server 192.0.2.12", "cp3"); err != nil {
		return err
	}
	if err := c.allReady(c.replicas...); err != nil {
		return err
	}
	before, err := c.running()
	if err != nil {
		return err
	}
	if err := c.unpacked("w1", thisRelease); err != nil {
		return err
	}
	if _, err := c.line("upgrade", "sudo ./install.sh agent --server 192.0.2.11", "w1"); err != nil {
		return err
	}
	if err := until(func() error { return c.newer(c.replicas...) }); err != nil {
		return err
	}
	if err := c.nodeReady(); err != nil {
		return err
	}
	if after, err := c.running(); err != nil || after != before {
		return fmt.Errorf("the agent of before left\n%s\nof\n%s (%w)", after, before, err)
	}
	return c.lineSays("leads now", "upgrade", "kctl cluster transfer-leader", "site")
}

// upgradeRest goes on where something is left to do, which is the worker.
func (c *cluster) upgradeRest() error {
	if err := c.ask(); err != nil {
		return err
	}
	before, err := c.running()
	if err != nil {
		return err
	}
	text := "kctl cluster upgrade -f cluster.yaml --to keelson-v1.1.0-linux-amd64.tar.gz"
	if _, err := c.line("upgrade", text, "site", "keelson-v1.1.0-linux-amd64.tar.gz", patient(c.site.tarball)); err != nil {
		return err
	}
	if err := c.newer(hosts...); err != nil {
		return err
	}
	if after, err := c.running(); err != nil || after != before {
		return fmt.Errorf("the newer agent left\n%s\nof\n%s (%w)", after, before, err)
	}
	return errors.Join(c.ready(), c.serves())
}
