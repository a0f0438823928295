package server

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/controlplane/recovery"
)

// Every replica tells of its own and of the others' certificates; an exchange of the replicas' authority shows as it goes;
// who may not read it is told nothing; a replica that does not answer is named.
func TestClusterCertificates(t *testing.T) {
	p := newPlane(t, 2, nil)
	read := func() (out api.ClusterCertificates) {
		t.Helper()
		if err := p.call("cp2", "GET", api.PathClusterCertificates, nil, &out); err != nil {
			t.Fatal(err)
		}
		return out
	}
	row := func(c api.ClusterCertificate) string {
		switch {
		case c.Signs:
			return c.Holder + " signs " + c.Use
		case c.Authority:
			return c.Holder + " believes " + c.Use
		}
		return c.Holder + " shows " + c.Use
	}
	rows := func(all api.ClusterCertificates) (out []string) {
		for _, c := range all.Certificates {
			if c.Expires <= time.Now().Unix() || c.Begins > time.Now().Unix() || c.Subject == "" || len(c.Key) != 16 || (c.Renews == 0) != c.Authority {
				t.Errorf("%+v", c)
			}
			out = append(out, row(c))
		}
		return out
	}
	var want []string
	for _, what := range []string{"signs cluster", "signs front proxy", "signs replicas", "shows front proxy", "shows replicas", "shows serving"} {
		want = append(want, "cp1 "+what, "cp2 "+what)
	}
	if have := rows(read()); !slices.Equal(have, want) {
		t.Errorf("there are\n%s\nwant\n%s", strings.Join(have, "\n"), strings.Join(want, "\n"))
	}

	file := t.TempDir() + "/peers"
	made, err := pki.MakePeerCA(file, "test", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := pki.TrustPeerCA(recovery.TrustFolder(p.members["cp1"].cfg.Dir()), file); err != nil {
		t.Fatal(err)
	}
	if _, err := pki.UsePeerCA(recovery.TrustFolder(p.members["cp1"].cfg.Dir()), file); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() error {
		all := read()
		i := slices.IndexFunc(all.Certificates, func(c api.ClusterCertificate) bool { return row(c) == "cp1 signs replicas" })
		if i < 0 || all.Certificates[i].Key != pki.SPKIHash(made)[:16] {
			return fmt.Errorf("cp1 does not sign by the new authority yet: %v", rows(all))
		}
		if n := len(all.Certificates); n != len(want)+1 {
			return fmt.Errorf("there are %d certificates: %v", n, rows(all))
		}
		return nil
	})
	var metrics string
	if err := p.call("cp1", "GET", "/metrics", nil, &metrics); err != nil ||
		!strings.Contains(metrics, fmt.Sprintf(`keelson_certificate_expiration_timestamp_seconds{key=%q,kind="authority",use="replicas"}`, pki.SPKIHash(made)[:16])) {
		t.Errorf("the metrics do not tell of the new authority, %v", err)
	}

	p.stop("cp1")
	if all := read(); all.Silent["cp1"] == "" || len(all.Silent) != 1 {
		t.Errorf("silent are %v", all.Silent)
	}
}

// Who looks at the status hears of an authority before it ends, with what to do.
func TestExpiringAlarms(t *testing.T) {
	now := time.Date(2026, 6, 1, 0, 0, 0, 0, time.UTC)
	day := func(n int) int64 { return now.AddDate(0, 0, n).Unix() }
	out := expiringAlarms([]api.ClusterCertificate{
		{Use: useCluster, Holder: "cp1", Authority: true, Signs: true, Expires: day(91)},
		{Use: useServing, Holder: "cp1", Expires: day(1)},
		{Use: usePeers, Holder: "cp1", Authority: true, Signs: true, Expires: day(89), Subject: "new"},
		{Use: usePeers, Holder: "cp1", Authority: true, Expires: day(-1), Subject: "old"},
		{Use: useCluster, Holder: "cp1", Authority: true, Signs: true, Expires: day(2), Subject: "ca"},
	}, now)
	if len(out) != 3 || !strings.Contains(out[0].Message, "new") || !strings.Contains(out[0].Remedy, "peer-ca create") ||
		!strings.Contains(out[1].Message, "old") || !strings.Contains(out[1].Remedy, "prune") || !strings.Contains(out[2].Remedy, "rotate cluster-ca") {
		t.Errorf("%+v", out)
	}
}
