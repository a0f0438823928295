package vm

import (
	"errors"
	"fmt"
	"strings"
)

// packaged is the worker that nothing but the package, and a person, makes one.
const packaged = "w2"

// dpkg puts the package of a release on it, by the line of a page.
func (c *cluster) dpkg(page, text, release string) (string, error) {
	words := strings.Fields(text)
	return c.line(page, text, packaged, words[len(words)-1], release+"/keelson-*-linux-amd64.deb")
}

// dpkgRefuses has a disk that is to be mounted on the data, and is not, keep the package off.
func (c *cluster) dpkgRefuses(page, text, release string) error {
	m := c.all[packaged]
	const table = "LABEL=none /var/lib/keelson/local-volumes ext4 nofail 0 2"
	if _, err := m.run("echo '" + table + "' >>/etc/fstab"); err != nil {
		return err
	}
	// dpkg itself notes the name of what it did not install.
	const there = "cat /usr/bin/keelson-* | sha256sum; dpkg-query -W -f '${db:Status-Status} ${Version}\\n' keelson 2>/dev/null | grep -v ^not-installed; systemctl show -p MainPID keelson-agent"
	before, err := m.run(there)
	if err != nil {
		return err
	}
	said, err := c.dpkg(page, text, release)
	if err == nil || !strings.Contains(said, "nothing was changed: a disk is to be mounted at /var/lib/keelson/local-volumes and is not") {
		return fmt.Errorf("dpkg does not refuse to install over a mount point: %s (%w)", said, err)
	}
	after, err := m.run(there)
	if err != nil || after != before {
		return fmt.Errorf("dpkg refused, and left\n%s\nof\n%s (%w)", after, before, err)
	}
	_, err = m.run("sed -i '/^LABEL=none/d' /etc/fstab")
	return err
}

// byPackage makes a worker of a machine as docs/how-to/install-with-package.md has it.
func (c *cluster) byPackage() error {
	if err := errors.Join(c.boot(packaged), c.allReady(c.replicas...)); err != nil {
		return err
	}
	const deb = "sudo dpkg -i keelson-v1.0.0-linux-amd64.deb"
	if err := c.dpkgRefuses("install", deb, thisRelease); err != nil {
		return err
	}
	if _, err := c.dpkg("install", deb, thisRelease); err != nil {
		return err
	}
	m := c.all[packaged]
	// What stands there as an example is made true, with a letter too many at first.
	if _, err := m.run("sed -i -e 's/^# server:.*/server: [" + c.all[c.asked].address + ":6444]/' -e 's/^# token-file:/token-files:/' -e 's/^# node-labels:/node-labels:/' /etc/keelson/agent.yaml"); err != nil {
		return err
	}
	if said, err := c.line("install", "keelson-agent check", packaged); err == nil || !strings.Contains(said, "token-files") {
		return fmt.Errorf("the key token-files is no error: %s (%w)", said, err)
	}
	if _, err := m.run("sed -i 's/^token-files:/token-file:/' /etc/keelson/agent.yaml"); err != nil {
		return err
	}
	if _, err := c.line("install", "keelson-agent check", packaged); err != nil {
		return err
	}
	said, err := c.line("operate", "token=$(kctl cluster token create --names w9 --ttl 1h)", "site", "w9", packaged, "--ttl 1h)", `--ttl 1h) && echo "$token"`)
	if err != nil {
		return err
	}
	t, err := token(said, "node")
	if err != nil {
		return err
	}
	if _, err := m.run("umask 077; mkdir -p /var/lib/keelson; echo " + t + " >/var/lib/keelson/join-token"); err != nil {
		return err
	}
	if _, err := c.line("install", "systemctl enable --now keelson-agent", packaged); err != nil {
		return err
	}
	if err := c.says("fast True", "get", "node", packaged, "-o", `jsonpath={.metadata.labels.disk} {.status.conditions[?(@.type=="Ready")].status}`); err != nil {
		return err
	}
	if err := c.apply("packaged", podsThere); err != nil {
		return err
	}
	return c.says("2", "get", "deployment", "packaged", "-o", "jsonpath={.status.readyReplicas}")
}

// podsThere are pods that can run on that worker alone.
const podsThere = `apiVersion: apps/v1
kind: Deployment
metadata: {name: packaged}
spec:
  replicas: 2
  selector: {matchLabels: {app: packaged}}
  template:
    metadata: {labels: {app: packaged}}
    spec:
      nodeSelector: {kubernetes.io/hostname: ` + packaged + `}
      containers: [{name: hello, image: keelson.dev/hello:v1}]
`

// upgradeByPackage has the next package over it exchange programs and nothing else, and then brings settings of somebody's own.
func (c *cluster) upgradeByPackage() error {
	if err := c.allReady(c.replicas...); err != nil {
		return err
	}
	m := c.all[packaged]
	const deb = "sudo dpkg -i keelson-v1.1.0-linux-amd64.deb"
	if err := c.dpkgRefuses("upgrade", deb, nextRelease); err != nil {
		return err
	}
	before, err := m.run(running)
	if err != nil || !strings.Contains(before, "hello") {
		return fmt.Errorf("pods of %s: %q (%w)", packaged, before, err)
	}
	const own = "sha256sum </etc/keelson/agent.yaml; systemctl is-enabled keelson-agent"
	settings, err := m.run(own)
	if err != nil {
		return err
	}
	agent, err := m.run("systemctl show -p MainPID keelson-agent")
	if err != nil {
		return err
	}
	if _, err := c.dpkg("upgrade", deb, nextRelease); err != nil {
		return err
	}
	if err := c.says(c.site.version, "get", "node", packaged, "-o", "jsonpath={.status.nodeInfo.containerRuntimeVersion}"); err != nil {
		return err
	}
	if is, err := m.run(own); err != nil || is != settings {
		return fmt.Errorf("settings were %s and are %s (%w)", settings, is, err)
	}
	if is, err := m.run("systemctl show -p MainPID keelson-agent"); err != nil || is == agent {
		return fmt.Errorf("the agent is %s as before (%w)", is, err)
	}
	if err := c.unpacked(packaged, nextRelease); err != nil {
		return err
	}
	const line = "install.sh --settings FILE"
	if _, err := m.run("(cat /etc/keelson/agent.yaml; echo max-podz: 33) >/root/own.yaml"); err != nil {
		return err
	}
	if said, err := c.line("install", line, packaged, line, "./install.sh agent --settings /root/own.yaml"); err == nil || !strings.Contains(said, "nothing was changed, since /etc/keelson/agent.yaml would be wrong") {
		return fmt.Errorf("the key max-podz is no error: %s (%w)", said, err)
	}
	if _, err := m.run("sed -i s/max-podz/max-pods/ /root/own.yaml"); err != nil {
		return err
	}
	if err := c.lineSays("restarting keelson-agent", "install", line, packaged, line, "./install.sh agent --settings /root/own.yaml"); err != nil {
		return err
	}
	if err := c.says("33 True", "get", "node", packaged, "-o", `jsonpath={.status.capacity.pods} {.status.conditions[?(@.type=="Ready")].status}`); err != nil {
		return err
	}
	if is, err := m.run("sha256sum </etc/keelson/agent.yaml.before; systemctl is-enabled keelson-agent"); err != nil || is != settings {
		return fmt.Errorf("settings were %s and are kept as %s (%w)", settings, is, err)
	}
	if after, err := m.run(running); err != nil || after != before {
		return fmt.Errorf("newer programs left\n%s\nof\n%s (%w)", after, before, err)
	}
	return c.says("2", "get", "deployment", "packaged", "-o", "jsonpath={.status.readyReplicas}")
}

// offForGood is what docs/how-to/maintain-a-worker.md says of a worker that will not come back.
func (c *cluster) offForGood() error {
	if err := c.allReady(c.replicas...); err != nil {
		return err
	}
	pod, err := c.kctl("get", "pods", "-l", "app=packaged", "-o", "jsonpath={.items[0].metadata.name}")
	if err != nil {
		return err
	}
	if err := c.lineSays("nothing stands in the way", "operate", "kctl net trace POD SERVICE", "site", "POD", pod, "SERVICE", "hello"); err != nil {
		return err
	}
	c.all[packaged].cut()
	// Its pods are to go, and nobody says that they have ended.
	if err := c.says("20", "get", "pod", pod, "-o", "jsonpath={.metadata.deletionTimestamp}"); err != nil {
		return err
	}
	if _, err := c.line("operate", "kctl taint node w3 node.kubernetes.io/out-of-service=nodeshutdown:NoExecute", "site", "w3", packaged); err != nil {
		return err
	}
	if err := until(func() error {
		out, err := c.kctl("get", "pods", "-A", "--field-selector=spec.nodeName="+packaged, "-o", "name")
		if err == nil && strings.TrimSpace(out) != "" {
			err = fmt.Errorf("there is %s", out)
		}
		return err
	}); err != nil {
		return err
	}
	if err := c.lineSays("deleted", "operate", "kctl delete node w3", "site", "w3", packaged); err != nil {
		return err
	}
	if _, err := c.kctl("delete", "deployment", "packaged"); err != nil {
		return err
	}
	return errors.Join(c.ready(), c.serves())
}
