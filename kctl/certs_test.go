package kctl

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"keelson.dev/keelson/controlplane/api"
)

// In the midst of an exchange of the replicas' authority one sees who has come how far; a replica that is silent is named.
func TestCerts(t *testing.T) {
	now := time.Date(2026, 6, 1, 0, 0, 0, 0, time.UTC)
	day := func(n int) int64 { return now.AddDate(0, 0, n).Unix() }
	all := api.ClusterCertificates{
		Certificates: []api.ClusterCertificate{
			{Use: "cluster", Holder: "cp1", Authority: true, Signs: true, Key: "aaaaaaaaaaaaaaaa", Expires: day(3000)},
			{Use: "cluster", Holder: "cp2", Authority: true, Signs: true, Key: "aaaaaaaaaaaaaaaa", Expires: day(3000)},
			{Use: "replicas", Holder: "cp1", Authority: true, Signs: true, Key: "bbbbbbbbbbbbbbbb", Expires: day(3650)},
			{Use: "replicas", Holder: "cp1", Authority: true, Key: "aaaaaaaaaaaaaaaa", Expires: day(3000)},
			{Use: "replicas", Holder: "cp2", Authority: true, Signs: true, Key: "aaaaaaaaaaaaaaaa", Expires: day(3000)},
			{Use: "replicas", Holder: "cp2", Authority: true, Key: "bbbbbbbbbbbbbbbb", Expires: day(3650)},
			{Use: "serving", Holder: "cp1", Key: "cccccccccccccccc",
				Expires: now.Add(36*time.Hour + time.Second).Unix(), Renews: day(1)},
			{Use: "serving", Holder: "cp2", Key: "dddddddddddddddd", Expires: day(-1), Renews: day(-4)},
			{Use: "agent", Holder: "w1", Node: true, Key: "eeeeeeeeeeeeeeee", Expires: day(300), Renews: day(200)},
			{Use: "agent", Holder: "w2", Node: true, Key: "ffffffffffffffff", Expires: day(200), Renews: day(100)},
			{Use: "serving", Holder: "w1", Node: true, Key: "0000000000000000", Expires: day(30), Renews: day(20)},
		},
		Silent: map[string]string{"cp3": "connection refused"},
	}
	var out bytes.Buffer
	for _, nodes := range []bool{false, true} {
		if err := printCerts(&out, all, nodes, now); err != nil {
			t.Fatal(err)
		}
		out.WriteString("\n")
	}
	golden(t, "certs.txt", out.String())
}

// Below the certificates stand the keys without an end, who goes by which, and what an exchange waits for. F51
func TestKeysShown(t *testing.T) {
	sa := func(name, signs string, believes ...string) api.ClusterKeyHolder {
		return api.ClusterKeyHolder{Name: name, Keys: []api.ClusterKeyHeld{
			{Kind: "peers-ca", Signs: "aaaaaaaaaaaaaaaa", Believes: []string{"aaaaaaaaaaaaaaaa"}},
			{Kind: "service-account-key", Signs: signs, Believes: believes},
			{Kind: "encryption-key", Signs: "init-20260601-000000-01234567",
				Believes: []string{"init-20260601-000000-01234567"}},
		}}
	}
	former, next := "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA", "BBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBB"
	all := api.ClusterKeys{
		Replicas: []api.ClusterKeyHolder{sa("cp1", next, former, next), sa("cp2", former, former, next),
			{Name: "cp3", Problem: "it does not answer: connection refused"}},
		Rotation: &api.ClusterRotation{Kind: "service-account-key", New: next, Old: former, Step: "use",
			Since: 1780272000000},
		Waiting: []string{"cp2: does not use the new key yet", "cp3: it does not answer: connection refused"},
	}
	var out bytes.Buffer
	if err := printKeys(&out, all); err != nil {
		t.Fatal(err)
	}
	all.Rotation.Step, all.Waiting, all.Replicas = "done", nil, []api.ClusterKeyHolder{sa("cp1", next, next)}
	out.WriteString("\n")
	if err := printKeys(&out, all); err != nil {
		t.Fatal(err)
	}
	golden(t, "keys.txt", out.String())
}

// Who was removed is named with what helps against each key that it has had. F51
func TestRemovedShown(t *testing.T) {
	for _, c := range []struct {
		kinds []string
		want  string
	}{
		{[]string{"cluster-ca", "cluster-secret", "peers-ca"},
			"good still: cluster-ca, cluster-secret, peers-ca. If its disk may be in wrong hands 'kctl cluster " +
				"rotate' cluster-ca, peers-ca, " +
				"cluster-secret goes with a new cluster alone (docs/how-to/respond-to-a-leaked-key.md); 'kctl " +
				"cluster rotate --clear-removed cp3' when it is wiped\n"},
		{[]string{"cluster-secret"}, "If its disk may be in wrong hands cluster-secret goes with a new cluster alone " +
			"(docs/how-to/respond-to-a-leaked-key.md); "},
		// by a release that names no secret
		{[]string{"peers-ca"}, "If its disk may be in wrong hands 'kctl cluster rotate' peers-ca; "},
	} {
		var out bytes.Buffer
		if err := printKeys(&out, api.ClusterKeys{Removed: []api.ClusterRemoved{{Name: "cp3", Kinds: c.kinds}}}); err !=
			nil {
			t.Fatal(err)
		}
		if !strings.Contains(out.String(), c.want) {
			t.Errorf("%v: got %q, want %q in it", c.kinds, out.String(), c.want)
		}
	}
}
