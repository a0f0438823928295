package install

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// Settings that are passed are installed as they are, and the previous file is kept beside them. A
// daemon with the previous settings is restarted, also by the run after an interrupted one.
func TestSettingsAreBrought(t *testing.T) {
	m := newMachine(t)
	unpacked, _ := m.release()
	script := filepath.Join(unpacked, "install.sh")
	settings, admin := filepath.Join(m.root, "tmp/settings"), filepath.Join(m.root, "tmp/admin")
	m.file(settings, "name: cp2\nadvertise-address: 192.0.2.12\n", 0o600)
	m.file(admin, "a kubeconfig\n", 0o600)
	install := func(want string, args ...string) []string {
		t.Helper()
		said, called, err := m.run(script, append([]string{"server", "--settings", settings}, args...)...)
		if err != nil || !strings.Contains(said, want) {
			t.Fatalf("%v: %s\nwant %s", err, said, want)
		}
		return called
	}
	restarted := func(called []string) bool {
		return slices.Contains(called, "systemctl restart keelson-controlplane.service")
	}
	install("joining the cluster", "--server", "192.0.2.11", "--token", "keelson1.controlplane.abc", "--admin", admin)
	tree := m.tree()
	for file, want := range map[string]string{
		"/etc/keelson/controlplane.yaml":                 "-rw------- name: cp2\nadvertise-address: 192.0.2.12\n",
		"/var/lib/keelson/controlplane/admin.kubeconfig": "-rw------- a kubeconfig\n"} {
		if tree[file] != want {
			t.Errorf("%s is %q, want %q", file, tree[file], want)
		}
	}
	if restarted(install("nothing has changed")) || !equal(tree, m.tree()) {
		t.Error("the second run changes something")
	}
	m.file(settings, "name: cp2\nadvertise-address: 192.0.2.12\ndebug: true\n", 0o600)
	if !restarted(install("restarting")) {
		t.Error("new settings restart nothing")
	}
	if after := m.tree(); after["/etc/keelson/controlplane.yaml.before"] != tree["/etc/keelson/controlplane.yaml"] ||
		!strings.HasSuffix(after["/etc/keelson/controlplane.yaml"], "debug: true\n") {
		t.Errorf("the settings of before are %q", after["/etc/keelson/controlplane.yaml.before"])
	}
	// Interrupted between the new programs and the restart.
	m.file(filepath.Join(m.root, "usr/bin/kctl"), "older", 0o755)
	m.fake("systemctl", `case $1 in
is-active) [ -e `+m.root+`/active ] ;;
restart) [ ! -e `+m.root+`/cut ] || exit 1 ;;
esac`)
	m.file(filepath.Join(m.root, "cut"), "", 0o644)
	if said, _, err := m.run(script, "server", "--settings", settings); err == nil ||
		!strings.Contains(said, "did not start") {
		t.Errorf("%v: %s", err, said)
	}
	if err := os.Remove(filepath.Join(m.root, "cut")); err != nil {
		t.Fatal(err)
	}
	if !restarted(install("restarting")) {
		t.Error("the run after one that was cut off restarts nothing")
	}
	if restarted(install("nothing has changed")) {
		t.Error("it is restarted again and again")
	}
}

// judging makes the daemons of a release refuse settings with a word, as their 'check' does.
func (m *machine) judging(unpacked, word string) {
	for _, daemon := range []string{"keelson-agent", "keelson-controlplane"} {
		path := filepath.Join(unpacked, "usr/bin", daemon)
		raw, err := os.ReadFile(path)
		if err != nil {
			m.t.Fatal(err)
		}
		m.file(path, string(raw)+`if [ "$1 $2" = "check --config" ] && grep -q `+word+` "$3"; then echo "`+daemon+
			`: $3, line 1: unknown key" >&2; exit 2; fi
`, 0o755)
	}
}

// Invalid settings are refused with the daemon's message before anything is changed: settings that
// are passed, and settings that a machine has.
func TestSettingsThatAreWrong(t *testing.T) {
	for _, c := range []struct{ role, daemon, file string }{{"agent", "keelson-agent", "/etc/keelson/agent.yaml"},
		{"server", "keelson-controlplane", "/etc/keelson/controlplane.yaml"}} {
		t.Run(c.role, func(t *testing.T) {
			m := newMachine(t)
			unpacked, _ := m.release()
			m.judging(unpacked, "max-pod:")
			script, settings := filepath.Join(unpacked, "install.sh"), filepath.Join(m.root, "tmp/settings")
			refused := func(args ...string) {
				t.Helper()
				before := m.tree()
				said, called, err := m.run(script, append([]string{c.role}, args...)...)
				want := "install: nothing was changed, since " + c.file + " would be wrong: " + c.daemon + ": " +
					c.file + ", line 1: unknown key\n"
				if err == nil || !strings.HasSuffix(said, want) {
					t.Errorf("%v: %s\nwant %s", err, said, want)
				}
				const lock = "/run/keelson-install.lock"
				if after := m.tree(); !equal(without(before, lock), without(after, lock)) {
					t.Errorf("something has changed: %v", after)
				}
				if slices.ContainsFunc(called, func(s string) bool { return strings.HasPrefix(s, "systemctl") }) {
					t.Errorf("called %q", called)
				}
			}
			bring := []string{"--settings", settings, "--server", "192.0.2.11", "--token", "keelson1.x"}
			if c.role == "agent" {
				bring = slices.Delete(bring, 2, 4)
			}
			m.file(settings, "max-pod: 60\n", 0o600)
			refused(bring...)
			m.file(settings, "max-pods: 60\n", 0o600)
			if said, _, err := m.run(script, append([]string{c.role}, bring...)...); err != nil {
				t.Fatalf("%v: %s", err, said)
			}
			m.file(settings, "max-pod: 60\n", 0o600)
			m.file(filepath.Join(m.root, "usr/bin/kctl"), "older", 0o755)
			refused(bring...)
			m.file(filepath.Join(m.root, c.file), "max-pod: 60\n", 0o600)
			refused("--server", "192.0.2.11", "--token", "keelson1.x")
			// Where the unit says more than the file, the file alone may look wrong.
			m.file(filepath.Join(m.root, "etc/systemd/system", c.daemon+".service.d/rights.conf"),
				"[Service]\nCapabilityBoundingSet=CAP_NET_RAW\n", 0o644)
			refused(bring...)
			m.file(filepath.Join(m.root, "etc/systemd/system", c.daemon+".service.d/override.conf"),
				"[Service]\nEnvironment=KEELSON_NAME=x\n", 0o644)
			if said, _, err := m.run(script, append([]string{c.role}, bring...)...); err != nil ||
				!strings.Contains(said, "override.conf says otherwise") {
				t.Errorf("%v: %s", err, said)
			}
			if err := os.Remove(filepath.Join(m.root, "etc/systemd/system",
				c.daemon+".service.d/override.conf")); err != nil {
				t.Fatal(err)
			}
			env := strings.TrimSuffix(c.file, "yaml") + "env"
			m.file(filepath.Join(m.root, env), "# KEELSON_NAME=x\n", 0o600)
			refused(bring...)
			m.file(filepath.Join(m.root, env), "KEELSON_NAME=x\n", 0o600)
			if said, _, err := m.run(script, append([]string{c.role}, bring...)...); err != nil ||
				!strings.Contains(said, env+" says otherwise") {
				t.Errorf("%v: %s", err, said)
			}
		})
	}
}

// Settings are judged from the folder in which the unit runs its daemon, wherever the file is named from. A replica does not see some
// folders, which 'check' of it cannot know: settings that name what lies there are refused, unless a unit of the operator's shows them.
func TestSettingsAreJudgedAsTheUnitRuns(t *testing.T) {
	m := newMachine(t)
	unpacked, _ := m.release()
	script, settings := filepath.Join(unpacked, "install.sh"), filepath.Join(m.root, "tmp/settings")
	daemon := filepath.Join(unpacked, "usr/bin/keelson-controlplane")
	raw, err := os.ReadFile(daemon)
	if err != nil {
		t.Fatal(err)
	}
	m.file(daemon,
		string(raw)+
			`if [ "$1" = check ]; then read -r first <"$3" && [ "$PWD" = / ] || { echo "it looks at $3 from $PWD" >&2; exit 2; }; fi
`, 0o755)
	install := func(more string) (said string, err error) {
		t.Helper()
		m.file(settings, "name: cp1\nadvertise-address: 192.0.2.11\n"+more, 0o600)
		from, err := os.Getwd()
		if err != nil {
			t.Fatal(err)
		}
		near, err := filepath.Rel(from, settings)
		if err != nil {
			t.Fatal(err)
		}
		said, _, err = m.run(script, "server", "--init", "--settings", near)
		return said, err
	}
	const lock = "/run/keelson-install.lock"
	for more, path := range map[string]string{
		"token-auth-file: /root/tokens.csv\n":                           "/root/tokens.csv",
		"  oidc-ca-file: \"/home/me/ca.pem\"\n":                         "/home/me/ca.pem",
		"backup-recipients: [\"age1x\", '/run/user/0/x', \"/srv/x\"]\n": "/run/user/0/x",
		"a:\n- /var/tmp/x # a comment\n":                                "/var/tmp/x",
		"store-key-file: /tmp/key\n":                                    "/tmp/key",
	} {
		before := without(m.tree(), "/tmp/settings", lock)
		want := "install: nothing was changed, since /etc/keelson/controlplane.yaml would be wrong: " +
			"keelson-controlplane: it does not see " + path + ", for its unit"
		if said, err := install(more); err == nil || !strings.Contains(said, want) {
			t.Errorf("%s: %v: %s", more, err, said)
		}
		if after := without(m.tree(), "/tmp/settings", lock); !equal(before, after) {
			t.Errorf("%s: something has changed", more)
		}
	}
	if said, err := install("# /tmp/key\nbackup-folder: /srv/tmp/x # not /tmp/x\noidc-issuer-url: " +
		"https://192.0.2.1/root/x\n"); err != nil || strings.Contains(said, "does not see") {
		t.Fatalf("%v: %s", err, said)
	}
	const hidden = "backup-folder: /var/tmp/backups\n"
	own := filepath.Join(m.root, "etc/systemd/system/keelson-controlplane.service.d/home.conf")
	m.file(own, "[Service]\nPrivateTmp=no\n", 0o644)
	if said, err := install(hidden); err != nil || !strings.Contains(said, "it does not see /var/tmp/backups") ||
		!strings.Contains(said, "home.conf says otherwise") {
		t.Errorf("%v: %s", err, said)
	}
	if err := os.Remove(own); err != nil {
		t.Fatal(err)
	}
	if said, err := install(hidden); err != nil || !strings.Contains(said, "it does not see /var/tmp/backups") {
		t.Errorf("what it has run with: %v: %s", err, said)
	}
}

// A daemon that ends with its new settings all the same gets those of before again, with the rights that go with them, also one that
// systemd restarts so fast that it is always found running.
func TestADaemonThatEndsGetsItsSettingsBack(t *testing.T) {
	for _, c := range []struct{ name, ends, want string }{
		{"it does not start", "exit 1", "/etc/keelson/controlplane.yaml is as it was before, and it runs with that"},
		{"it ends", "rm -f ROOT/active", "/etc/keelson/controlplane.yaml is as it was before, and it runs with that"},
		{"it ends and is begun again", "touch ROOT/flaps",
			"/etc/keelson/controlplane.yaml is as it was before, and it runs with that"},
		{"it ends with both", "touch ROOT/flaps ROOT/always",
			"and with those of before, which are in /etc/keelson/controlplane.yaml again"},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := newMachine(t)
			unpacked, _ := m.release()
			script, settings := filepath.Join(unpacked, "install.sh"), filepath.Join(m.root, "tmp/settings")
			m.fake("systemctl", strings.ReplaceAll(`case $1 in
is-active) [ -e ROOT/active ] ;;
start | restart)
  touch ROOT/active; [ -e ROOT/always ] || rm -f ROOT/flaps
  if grep -q bad ROOT/etc/keelson/controlplane.yaml; then `+c.ends+`; fi ;;
show) if [ -e ROOT/flaps ]; then n=$(cat ROOT/tmp/pid 2>/dev/null || echo 1); echo "MainPID=$n"; echo 1$n >ROOT/tmp/pid; else echo MainPID=7; fi ;;
esac`, "ROOT", m.root))
			m.fake("journalctl", "echo this is its last word")
			args := []string{"server", "--settings", settings, "--init"}
			const good = "name: cp1\nadvertise-address: 192.0.2.11\n"
			m.file(settings, good, 0o600)
			if said, _, err := m.run(script, args...); err != nil {
				t.Fatalf("%v: %s", err, said)
			}
			m.file(settings, good+"api-address-shared: 192.0.2.10\nbad: true\n", 0o600)
			said, called, err := m.run(script, args...)
			if err == nil || !strings.Contains(said, c.want) ||
				!strings.Contains(said, "install:   this is its last word\n") {
				t.Errorf("%v: %s\nwant %s", err, said, c.want)
			}
			tree := m.tree()
			if got := tree["/etc/keelson/controlplane.yaml"]; got != "-rw------- "+good {
				t.Errorf("the settings are %q", got)
			}
			if rights,
				there := tree["/etc/systemd/system/keelson-controlplane.service.d/api-address-shared.conf"]; there {
				t.Errorf("it has the rights of the new settings: %s", rights)
			}
			const restart = "systemctl restart keelson-controlplane.service"
			inOrder(t, called, restart, "systemctl daemon-reload", restart)
			for at := range tree {
				if strings.HasPrefix(at, "/tmp/") && at != "/tmp/settings" && at != "/tmp/pid" {
					t.Errorf("%s is left", at)
				}
			}
		})
	}
}

// An address that replicas share needs rights that the unit does not have: they come with the setting and go with it.
func TestRightsFollowTheSettings(t *testing.T) {
	m := newMachine(t)
	unpacked, _ := m.release()
	script, settings := filepath.Join(unpacked, "install.sh"), filepath.Join(m.root, "tmp/settings")
	const rights = "/etc/systemd/system/keelson-controlplane.service.d/api-address-shared.conf"
	install := func(more string) (called []string) {
		t.Helper()
		m.file(settings, "name: cp1\nadvertise-address: 192.0.2.11\n"+more, 0o600)
		said, called, err := m.run(script, "server", "--init", "--settings", settings)
		if err != nil {
			t.Fatalf("%v: %s", err, said)
		}
		return called
	}
	install("# api-address-shared: 192.0.2.10\n")
	if _, there := m.tree()[rights]; there {
		t.Error("a replica without a shared address has its rights")
	}
	for _, setting := range []string{"api-address-shared: 192.0.2.10\n", "api-address-shared: \"192.0.2.10\"\n"} {
		called := install(setting)
		if got := m.tree()[rights]; !strings.HasPrefix(got, "-rw-r--r-- ") ||
			!strings.HasSuffix(got,
				"\n[Service]\nCapabilityBoundingSet=CAP_NET_ADMIN CAP_NET_RAW\nRestrictAddressFamilies=AF_PACKET\n") {
			t.Errorf("with %q: %q", setting, got)
		}
		inOrder(t, called, "systemctl daemon-reload", "systemctl restart keelson-controlplane.service")
	}
	inOrder(t, install(""), "systemctl daemon-reload", "systemctl restart keelson-controlplane.service")
	if _, there := m.tree()[rights]; there {
		t.Error("the rights stay when the address is not shared any more")
	}
	if slices.Contains(install(""), "systemctl restart keelson-controlplane.service") {
		t.Error("it is restarted again and again")
	}
	install("api-address-shared: 192.0.2.10\n")
	if said, _, err := m.run(filepath.Join(unpacked, "uninstall.sh")); err != nil {
		t.Fatalf("%v: %s", err, said)
	}
	if _, err := os.Stat(filepath.Join(m.root, filepath.Dir(rights))); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("uninstall.sh leaves %s: %v", filepath.Dir(rights), err)
	}
}

// Settings of a run after which the machine has not joined give way to those of the next, and are kept beside them; those of a machine
// that has joined stay.
func TestTheNextRunKnowsBetter(t *testing.T) {
	m := newMachine(t)
	unpacked, _ := m.release()
	script, file := filepath.Join(unpacked, "install.sh"), "/etc/keelson/controlplane.yaml"
	if said, _, err := m.run(script, "server", "--init", "--no-start", "--advertise-address", "192.0.2.11"); err !=
		nil {
		t.Fatalf("%v: %s", err, said)
	}
	said, _, err := m.run(script, "server", "--init", "--advertise-address", "192.0.2.11", "--name", "cp7")
	if err != nil || !strings.Contains(m.tree()[file], `name: "cp7"`) ||
		strings.Contains(m.tree()[file+".before"], "cp7") {
		t.Fatalf("%v: %s\n%s", err, said, m.tree()[file])
	}
	said, _, err = m.run(script, "server", "--init", "--advertise-address", "192.0.2.11", "--name", "cp8")
	if err != nil || !strings.Contains(said, "kept "+file) || !strings.Contains(m.tree()[file], `name: "cp7"`) {
		t.Errorf("a replica: %v: %s\n%s", err, said, m.tree()[file])
	}
}
