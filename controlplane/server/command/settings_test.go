package command

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"keelson.dev/keelson/internal/settings"
)

// Values of the configuration file and the environment are validated like flags.
func TestSettingsOfTheFile(t *testing.T) {
	at := "name: cp1\ndata-dir: " + initDataDir(t) + "\nadvertise-address: 127.0.0.1\n"
	for _, c := range []struct {
		args, file, env string
		want            string
	}{
		{"run", at + "store-quota: 1Mi", "", "--store-quota 1048576 bytes: want at least 16Mi"},
		{"run", at + "store-quota: 1Mi", "KEELSON_STORE_QUOTA=2Mi", "--store-quota 2097152 bytes: want at least 16Mi"},
		{"run --store-quota=3Mi", at + "store-quota: 1Mi", "KEELSON_STORE_QUOTA=2Mi",
			"--store-quota 3145728 bytes: want at least 16Mi"},
		{"run", at + "eviction-seconds: -1", "", "--eviction-seconds -1"},
		{"run", at, "KEELSON_EVICTION_SECONDS=x", "KEELSON_EVICTION_SECONDS in the environment: "},
		{"run", at + "store_quota: 1Gi", "", `line 4: unknown key "store_quota": the nearest is store-quota`},
		{"run", at + "name: cp2", "", "line 4: duplicate key name: it is already set in line 1"},
		{"run", at + "output: json", "", `line 4: unknown key "output"`},
		{"run", at + "unsafe-lost-majority: true", "", `line 4: unknown key "unsafe-lost-majority"`},
		{"run", at + "enable-admission-plugins: PodSecurity", "", "line 4: enable-admission-plugins: want a list"},
		// keys of init are allowed
		{"run", at + "cluster-cidr: 10.0.0.0/8\nhistory-revisions: 10", "",
			"--history-revisions 10: want at least 1000"},
		{"join", at + "server: [192.0.2.1]\ntoken: x", "", "token"},
		{"convert-log", at + "log-store: etcd", "", `--to "": want bolt or wal`},
		{"check", at + "store-quota: 1Mi", "", "--store-quota 1048576 bytes: want at least 16Mi"},
		{"check", at + "store-quota: 4Gx", "", `--store-quota "4Gx": want a size such as 512Mi or 8Gi`},
		{"check", at + "store_quota: 1Gi", "", `line 4: unknown key "store_quota": the nearest is store-quota`},
		{"check", at + "eviction-seconds: -1", "", "--eviction-seconds -1"},
		{"check", at + "backup-folder: /backups", "", "--backup-folder requires --backup-schedule"},
		{"check", at + "scheduler-config: /does/not/exist", "", "/does/not/exist"},
		{"check", at + "admission-control-config-file: /does/not/exist", "", "/does/not/exist"},
		{"check", at + "audit-log-mode: strict", "", `--audit-log-mode "strict": want batch or blocking-strict`},
		{"check", at + "audit-policy-file: /does/not/exist", "", "/does/not/exist"},
		{"check", "name: cp1\n", "", "--advertise-address"},
		{"init", at, "", "already belongs to a cluster"}, // the data directory in the file has a cluster
	} {
		t.Run(c.args+" "+strings.TrimPrefix(c.file, at)+c.env, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "controlplane.yaml")
			if err := os.WriteFile(path, []byte(c.file), 0o600); err != nil {
				t.Fatal(err)
			}
			if name, value, ok := strings.Cut(c.env, "="); ok {
				t.Setenv(name, value)
			}
			out, err := runCommandLine(append(strings.Fields(c.args), "--config="+path)...)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v %s\nwant %s", err, out, c.want)
			}
		})
	}
	if _, err := runCommandLine("run", "--config=/does/not/exist"); err == nil ||
		!strings.Contains(err.Error(), "/does/not/exist") {
		t.Errorf("a configured file that does not exist: %v", err)
	}
}

// Valid settings are accepted without a data directory, and none is created.
func TestSettingsThatAreGood(t *testing.T) {
	dir := t.TempDir()
	path, data := filepath.Join(dir, "controlplane.yaml"), filepath.Join(dir, "data")
	file := "name: cp1\nadvertise-address: 192.0.2.11\ndata-dir: " + data +
		"\nstore-quota: 4Gi\ncluster-cidr: 10.1.0.0/16\ndebug: true\n"
	if err := os.WriteFile(path, []byte(file), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := runCommandLine("check", "--config="+path); err != nil || out != "" {
		t.Errorf("%v: %s", err, out)
	}
	if _, err := os.Stat(data); err == nil {
		t.Errorf("%s was created", data)
	}
}

// The help names the key and the environment variable of each flag that has them, and of no other
// flag.
func TestHelpNamesTheKeys(t *testing.T) {
	root := New("test")
	keys := settingsKeys(root)
	for verb, want := range map[string][2]string{
		"run":     {"[key store-quota, KEELSON_STORE_QUOTA]", "KEELSON_CONFIG"},
		"init":    {"[key cluster-cidr, KEELSON_CLUSTER_CIDR]", "KEELSON_OUTPUT"},
		"restore": {"[key data-dir, KEELSON_DATA_DIR]", "KEELSON_REPLACE"},
		// its ranges are not the ranges of init
		"add-address-family": {"[key data-dir, KEELSON_DATA_DIR]", "KEELSON_CLUSTER_CIDR"},
		"add-family":         {"[key data-dir, KEELSON_DATA_DIR]", "KEELSON_CLUSTER_CIDR"}, // its previous name
	} {
		out, err := runCommandLine(verb, "--help")
		if err != nil || !strings.Contains(out, want[0]) || strings.Contains(out, want[1]) {
			t.Errorf("%s --help: %v: want %s and not %s in\n%s", verb, err, want[0], want[1], out)
		}
	}
	for _, k := range keys {
		for _, c := range root.Commands() {
			if f := c.Flags().Lookup(k.name); f != nil && acceptsKey(keys, c, k.name) &&
				settings.KindOf(f.Value.Type()) != k.kind {
				t.Errorf("%s accepts --%s as %v, another verb as %v", c.Name(), k.name,
					settings.KindOf(f.Value.Type()), k.kind)
			}
		}
		if k.name == "help" || k.name == "config" ||
			strings.HasPrefix(settings.EnvironmentName(k.name), "KEELSON_LAB") {
			t.Errorf("%s must not be a key", k.name)
		}
	}
}
