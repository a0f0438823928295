package operator_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/controlplane/recovery"
	"keelson.dev/keelson/controlplane/server/servertest"
)

// Each replica reports its own certificates and the certificates of the other replicas. A rotation
// of the CA of the replicas is visible in the report and in the metrics. A replica that does not
// respond is listed as silent.
func TestClusterCertificates(t *testing.T) {
	p := newPlane(t, 2, nil)
	read := func() (out api.ClusterCertificates) {
		t.Helper()
		if err := p.Call("cp2", "GET", api.PathClusterCertificates, nil, &out); err != nil {
			t.Fatal(err)
		}
		return out
	}
	row := func(c api.ClusterCertificate) string {
		switch {
		case c.Signs:
			return c.Holder + " signs " + c.Use
		case c.Authority:
			return c.Holder + " trusts " + c.Use
		}
		return c.Holder + " presents " + c.Use
	}
	rows := func(all api.ClusterCertificates) (out []string) {
		for _, c := range all.Certificates {
			if c.Expires <= time.Now().Unix() || c.Begins > time.Now().Unix() || c.Subject == "" || len(c.Key) != 16 ||
				(c.Renews == 0) != c.Authority {
				t.Errorf("the report has an invalid certificate: %+v", c)
			}
			out = append(out, row(c))
		}
		return out
	}
	var want []string
	for _, what := range []string{"signs cluster", "signs front proxy", "signs replicas", "presents front proxy",
		"presents replicas", "presents serving"} {
		want = append(want, "cp1 "+what, "cp2 "+what)
	}
	if have := rows(read()); !slices.Equal(have, want) {
		t.Errorf("the certificates are\n%s\nwant\n%s", strings.Join(have, "\n"), strings.Join(want, "\n"))
	}

	file := t.TempDir() + "/peers"
	made, err := pki.MakePeerCA(file, "test", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := pki.TrustPeerCA(recovery.TrustFolder(p.Members["cp1"].Config.Dir()), file); err != nil {
		t.Fatal(err)
	}
	if _, err := pki.UsePeerCA(recovery.TrustFolder(p.Members["cp1"].Config.Dir()), file); err != nil {
		t.Fatal(err)
	}
	servertest.Eventually(t, func() error {
		all := read()
		i := slices.IndexFunc(all.Certificates, func(c api.ClusterCertificate) bool {
			return row(c) == "cp1 signs replicas"
		})
		if i < 0 || all.Certificates[i].Key != pki.SPKIHash(made)[:16] {
			return fmt.Errorf("cp1 does not sign with the new CA yet: %v", rows(all))
		}
		if n := len(all.Certificates); n != len(want)+1 {
			return fmt.Errorf("there are %d certificates, want %d: %v", n, len(want)+1, rows(all))
		}
		return nil
	})
	var metrics string
	if err := p.Call("cp1", "GET", "/metrics", nil, &metrics); err != nil ||
		!strings.Contains(metrics,
			fmt.Sprintf(`keelson_certificate_expiration_timestamp_seconds{key=%q,kind="authority",use="replicas"}`,
				pki.SPKIHash(made)[:16])) {
		t.Errorf("the metrics do not contain the new CA, error %v", err)
	}

	p.StopReplica("cp1")
	if all := read(); all.Silent["cp1"] == "" || len(all.Silent) != 1 {
		t.Errorf("the silent replicas are %v, want cp1", all.Silent)
	}
}
