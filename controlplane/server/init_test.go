package server

import (
	"strings"
	"testing"

	"keelson.dev/keelson/controlplane/datadir"
)

// Init refuses names that Join would refuse. A replica that already has such a name can run.
func TestInitNames(t *testing.T) {
	for _, c := range []struct{ name, cluster, says string }{
		{"cp1", "prod-1", ""},
		{"cp_1", "prod", `--name "cp_1"`},
		{"CP1", "prod", `--name "CP1"`},
		{"cp1.example.com", "prod", `--name "cp1.example.com"`},
		{"cp1", "prod_1", `--cluster-name "prod_1"`},
		{"cp1", "a/b", `--cluster-name "a/b"`},
		{"cp1", strings.Repeat("a", 64), "--cluster-name"},
	} {
		conf := Config{Name: c.name, DataDir: t.TempDir(), Advertise: "192.0.2.11"}
		_, err := Init(conf, datadir.Cluster{Name: c.cluster}, InitOptions{})
		if (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("--name %q --cluster-name %q: %v, want %q", c.name, c.cluster, err, c.says)
		}
	}
	conf := Config{Name: "cp_1", DataDir: t.TempDir(), Advertise: "192.0.2.11"}
	if err := conf.checkSettings(); err != nil {
		t.Errorf("a replica that has such a name cannot run: %v", err)
	}
}
