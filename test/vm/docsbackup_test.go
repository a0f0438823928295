package vm

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// administrator gives root of a machine the kubeconfig of the site.
func (c *cluster) administrator(name string) error {
	if err := c.ask(); err != nil {
		return err
	}
	raw, err := os.ReadFile(filepath.Join(c.site.dir, c.site.kubeconfig))
	if err != nil {
		return err
	}
	_, err = c.all[name].run("umask 077; cd /root; export KUBECONFIG=/root/kubeconfig; cat >/root/kubeconfig <<'EOT'\n" + string(raw) + "\nEOT")
	return err
}

// backups tries one, looks into it, and has the cluster be what it was then.
func (c *cluster) backups() error {
	n, err := c.note(nil)
	if err != nil {
		return err
	}
	at := n.Left
	m := c.all[at]
	if err := errors.Join(c.allReady(c.replicas...), c.administrator(at)); err != nil {
		return err
	}
	if err := until(func() error {
		return c.lineSays("/var/backups/keelson/", "recover", "keelson-controlplane backup list", at)
	}); err != nil {
		return err
	}
	if _, err := c.line("recover", "keelson-controlplane backup fetch /root/newest", at, "/root/newest", "/root/fetched"); err != nil {
		return err
	}
	if _, err := c.line("recover", "kctl cluster restore-test", at); err != nil {
		return err
	}
	if _, err := c.line("recover", "kctl cluster restore-test --fresh", at); err != nil {
		return err
	}
	if _, err := c.kctl("create", "configmap", "in-the-backup", "--from-literal=a=kept"); err != nil {
		return err
	}
	if _, err := c.line("operate", "kctl cluster backup today", at, "today", "/var/backups/keelson/by-hand"); err != nil {
		return err
	}
	if err := c.lineSays("configmaps", "operate", "kctl cluster backup inspect today", at, "today", "/var/backups/keelson/by-hand"); err != nil {
		return err
	}
	if _, err := c.line("operate", "kctl cluster restore-test today", at, "today", "/var/backups/keelson/by-hand"); err != nil {
		return err
	}
	if _, err := m.run("cp /var/backups/keelson/by-hand /root/newest"); err != nil {
		return err
	}
	if err := c.lookInto(at); err != nil {
		return err
	}
	if _, err := c.kctl("create", "configmap", "after-the-backup", "--from-literal=a=b"); err != nil {
		return err
	}
	if err := c.each(func(m *machine) error { _, err := m.run("systemctl stop keelson-controlplane"); return err }, c.replicas...); err != nil {
		return err
	}
	if err := c.lineSays("sealed", "recover", "keelson-controlplane backup inspect /root/newest", at); err != nil {
		return err
	}
	if _, err := c.line("recover", "keelson-controlplane restore /root/newest --replace", at); err != nil {
		return err
	}
	if _, err := c.line("recover", "systemctl start keelson-controlplane", at); err != nil {
		return err
	}
	if err := c.allReady(at); err != nil {
		return err
	}
	for _, name := range n.Others {
		if _, err := c.line("recover", "keelson-controlplane rebuild --server ADDRESS-OF-THE-FIRST", name, "ADDRESS-OF-THE-FIRST", m.address); err != nil {
			return err
		}
		if _, err := c.line("recover", "systemctl start keelson-controlplane", name); err != nil {
			return err
		}
	}
	if err := errors.Join(c.allReady(c.replicas...), c.nothingLost()); err != nil {
		return err
	}
	if out, err := c.kctl("get", "configmap", "in-the-backup", "after-the-backup", "--ignore-not-found", "-o", "name"); err != nil || strings.TrimSpace(out) != "configmap/in-the-backup" {
		return fmt.Errorf("of what was made before and after the backup there is %q (%w)", out, err)
	}
	return errors.Join(c.nodeReady(), c.ready(), c.serves())
}

// lookInto serves a backup for a look, and reads one object of it.
func (c *cluster) lookInto(at string) error {
	m := c.all[at]
	text := "kctl cluster backup serve /backups/today"
	out, err := c.line("recover", text, at, text, "(kctl cluster backup serve /root/newest >/root/served 2>&1 & echo $! >/root/serving); "+
		"i=0; until grep KUBECONFIG /root/served; do i=$((i+1)); [ $i -lt 400 ] && kill -0 $(cat /root/serving) || { cat /root/served; exit 1; }; sleep 1; done")
	if err != nil {
		return err
	}
	found := regexp.MustCompile(`KUBECONFIG=\S+`).FindString(out)
	if err := c.lineSays("a: kept", "recover", "KUBECONFIG=... kubectl get configmap NAME -o yaml", at, "KUBECONFIG=...", found, "kubectl", "kctl", "NAME", "in-the-backup"); err != nil {
		return err
	}
	_, err = m.run("kill -INT $(cat /root/serving)")
	return err
}

// newKeys is what is left to do when pki/ of all replicas is lost: new keys, the data of a backup, and workers that join anew.
func (c *cluster) newKeys() error {
	n, err := c.note(nil)
	if err != nil {
		return err
	}
	at := n.Left
	m := c.all[at]
	before, err := c.running()
	if err != nil {
		return err
	}
	if _, err := m.run("cp /var/lib/keelson/controlplane/pki/store.keys /root/old.keys"); err != nil {
		return err
	}
	if err := c.each(func(m *machine) error {
		_, err := m.run("systemctl stop keelson-controlplane; rm -rf /var/lib/keelson/controlplane")
		return err
	}, c.replicas...); err != nil {
		return err
	}
	if _, err := c.line("recover", "keelson-controlplane init --advertise-address OWN-ADDRESS --cluster-name NAME", at, "OWN-ADDRESS", m.address, "NAME", "keelson"); err != nil {
		return err
	}
	if _, err := c.line("recover", "keelson-controlplane restore /root/newest --any-cluster --backup-keys OLD-STORE.KEYS", at, "OLD-STORE.KEYS", "/root/old.keys"); err != nil {
		return err
	}
	if _, err := c.line("recover", "systemctl start keelson-controlplane", at); err != nil {
		return err
	}
	kubeconfig, err := m.run("cat /var/lib/keelson/controlplane/admin.kubeconfig")
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(c.site.dir, c.site.kubeconfig), []byte(kubeconfig), 0o600); err != nil {
		return err
	}
	if err := errors.Join(c.allReady(at), c.nothingLost()); err != nil {
		return err
	}
	out, err := c.line("recover", "kctl cluster token create --names w1,w2 --replace", "site", "w1,w2", "w1")
	if err != nil {
		return err
	}
	t, err := token(out, "node")
	if err != nil {
		return err
	}
	if _, err := c.line("recover", "sudo sh -c 'umask 077 && echo TOKEN >/var/lib/keelson/join-token' && sudo systemctl restart keelson-agent", "w1", "TOKEN", t); err != nil {
		return err
	}
	if err := errors.Join(c.nodeReady(), c.ready(), c.serves()); err != nil {
		return err
	}
	if now, err := c.running(); err != nil || now != before {
		return fmt.Errorf("pods did not go on: before\n%s\nnow\n%s (%w)", before, now, err)
	}
	return nil
}
