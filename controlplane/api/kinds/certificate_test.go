package kinds

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"math/big"
	"strings"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api/kinds/certificates"
)

// made are a request and certificates as PEM.
type made struct{ request, forged, authority, another, leaf string }

func makePEM(t *testing.T) made {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: pkix.Name{CommonName: "a"}}, key)
	if err != nil {
		t.Fatal(err)
	}
	block := func(kind string, der []byte) string {
		return string(pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}))
	}
	cert := func(serial int64, authority bool) string {
		c := &x509.Certificate{SerialNumber: big.NewInt(serial), NotAfter: t0, BasicConstraintsValid: true, IsCA: authority}
		der, err := x509.CreateCertificate(rand.Reader, c, c, key.Public(), key)
		if err != nil {
			t.Fatal(err)
		}
		return block("CERTIFICATE", der)
	}
	forged := append([]byte(nil), der...)
	forged[len(forged)-1] ^= 1 // within the signature
	return made{block("CERTIFICATE REQUEST", der), block("CERTIFICATE REQUEST", forged), cert(1, true), cert(2, true), cert(3, false)}
}

func csrText(request, rest string) string {
	return "{metadata: {name: a}, spec: {request: " + base64.StdEncoding.EncodeToString([]byte(request)) + ", " + rest + "}}"
}

func TestCertificateSigningRequest(t *testing.T) {
	pems := makePEM(t)
	const right = "signerName: x.io/y, usages: [client auth]"
	signer := func(name string) string {
		return csrText(pems.request, "usages: [client auth], signerName: '"+name+"'")
	}
	wrong := func(value, why string) string { return invalidText("spec.signerName", value, why) }
	const request = `spec.request: Invalid value: "<value omitted>": `
	long := strings.Repeat("a.", 127) + "io"
	refuses[*certificatesv1.CertificateSigningRequest](t,
		bad{csrText(pems.request, right+", expirationSeconds: 600"), ""},
		bad{strings.Replace(csrText(pems.request, right), "name: a", "name: 'Any:Name_'", 1), ""},
		bad{csrText("", right), request + "PEM block type must be CERTIFICATE REQUEST"},
		bad{csrText("nonsense", right), request + "PEM block type must be CERTIFICATE REQUEST"},
		bad{csrText(pems.leaf, right), request + "PEM block type must be CERTIFICATE REQUEST"},
		bad{csrText("-----BEGIN CERTIFICATE REQUEST-----\nMAA=\n-----END CERTIFICATE REQUEST-----\n", right), request + "asn1: syntax error: sequence truncated"},
		bad{csrText(pems.request, "signerName: x.io/y"), "spec.usages: Required value"},
		bad{csrText(pems.request, "signerName: x.io/y, usages: [client auth, client auth]"), `spec.usages[1]: Duplicate value: "client auth"`},
		bad{csrText(pems.request, right+", expirationSeconds: 599"), "spec.expirationSeconds: Invalid value: 599: may not specify a duration less than 600 seconds (10 minutes)"},
		bad{csrText(pems.request, "usages: [any]"), "spec.signerName: Required value"},
		bad{signer("kubernetes.io/legacy-unknown"), wrong("kubernetes.io/legacy-unknown", "the legacy signerName is not allowed via this API version")},
		bad{signer("x.io"), wrong("x.io", "must be a fully qualified domain and path of the form 'example.com/signer-name'")},
		bad{signer("x.io/a/b"), wrong("x.io/a/b", "must be a fully qualified domain and path of the form 'example.com/signer-name'")},
		bad{signer("io/a"), wrong("io", "should be a domain with at least two segments separated by dots")},
		bad{signer("X.io/a"), wrong("X.io", `validating label "X": `+notLabel)},
		bad{signer("x..io/a"), wrong("x..io", `validating label "": `+notLabel)},
		bad{signer("/a"), wrong("", `validating label "": `+notLabel) + "\n" + wrong("", "should be a domain with at least two segments separated by dots")},
		bad{signer("x.io/"), wrong("", `validating label "": `+notSubdomain)},
		bad{signer("x.io/A"), wrong("A", `validating label "A": `+notSubdomain)},
		bad{signer("x.io/a.B"), wrong("a.B", `validating label "B": `+notSubdomain)},
		bad{signer(long + "/a"), "spec.signerName: Too long: may not be more than 253 bytes"},
		bad{signer("x.io/" + strings.Repeat("aaaa.", 200) + "a"), "spec.signerName: Too long: may not be more than 571 bytes"},
		bad{"{metadata: {name: a/b}, spec: {}}", invalidText("metadata.name", "a/b", "may not contain '/'") + "\n" + request +
			"PEM block type must be CERTIFICATE REQUEST\nspec.usages: Required value\nspec.signerName: Required value"},
	)
	// One whose key did not sign it, and a usage that nobody knows.
	forged := load[*certificatesv1.CertificateSigningRequest](t, csrText(pems.forged, "signerName: x.io/y, usages: [fun]"))
	got := lines(All().ByType(forged).Judge(forged, nil))
	if !strings.HasPrefix(got, request+"x509: ECDSA verification failure") || !strings.Contains(got, `spec.usages[0]: Unsupported value: "fun": supported values: "any", "cert sign"`) {
		t.Error(got)
	}
}

func TestCertificateSigningRequestUpdate(t *testing.T) {
	pems := makePEM(t)
	type csr = certificatesv1.CertificateSigningRequest
	text := csrText(pems.request, "signerName: x.io/y, usages: [client auth], username: eve")
	condition := func(kinds ...certificatesv1.RequestConditionType) func(*csr) {
		return func(c *csr) {
			c.Status.Conditions = nil
			for _, k := range kinds {
				c.Status.Conditions = append(c.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{Type: k, Status: corev1.ConditionTrue})
			}
		}
	}
	issue := func(cert string) func(*csr) { return func(c *csr) { c.Status.Certificate = []byte(cert) } }
	const at = "status.conditions"
	changes(t, text,
		// Of the object itself only the metadata changes.
		changed[*csr]{change: func(c *csr) {
			c.Spec.Username, c.Spec.SignerName = "admin", "z"
			condition("Approved")(c)
			issue(pems.leaf)(c)
		}},
		changed[*csr]{sub: "approval", change: condition("Approved")},
		changed[*csr]{sub: "approval", change: condition("Denied")},
		changed[*csr]{sub: "approval", change: func(c *csr) { condition("Denied")(c); issue("x")(c); c.Spec.Username = "admin" }},
		changed[*csr]{sub: "approval", change: condition("Approved", "Denied"), want: at + `: Invalid value: "{Approved, Denied}": Approved and Denied conditions are mutually exclusive`},
		changed[*csr]{sub: "approval", change: condition("Approved", "Approved"), want: at + `[1].type: Duplicate value: "Approved"`},
		changed[*csr]{sub: "approval", change: condition(""), want: at + "[0].type: Required value"},
		changed[*csr]{sub: "approval", change: func(c *csr) { condition("Approved")(c); c.Status.Conditions[0].Status = "False" },
			want: at + `[0].status: Unsupported value: "False": supported values: "True"`},
		changed[*csr]{sub: "approval", change: func(c *csr) { condition("Other")(c); c.Status.Conditions[0].Status = "" }, want: at + "[0].status: Required value"},
		changed[*csr]{sub: "status", change: condition("Failed")},
		changed[*csr]{sub: "status", change: issue(pems.leaf + pems.authority)},
		changed[*csr]{sub: "status", change: condition("Approved"), want: at + `: Forbidden: updates may not add a condition of type "Approved"`},
		changed[*csr]{sub: "status", change: condition("Denied"), want: at + `: Forbidden: updates may not add a condition of type "Denied"`},
		changed[*csr]{sub: "status", change: issue(pems.request), want: `status.certificate: Invalid value: "<certificate data>": only CERTIFICATE PEM blocks are allowed, found "CERTIFICATE REQUEST"`},
		changed[*csr]{sub: "status", change: issue("x"), want: `status.certificate: Invalid value: "<certificate data>": must contain at least one CERTIFICATE PEM block`},
		changed[*csr]{sub: "status", change: issue(strings.Replace(pems.leaf, "-----\n", "-----\na: b\n\n", 1)), want: `status.certificate: Invalid value: "<certificate data>": no PEM block headers are permitted`},
	)
	done := strings.TrimSuffix(text, "}") + ", status: {conditions: [{type: Approved, status: 'True'}, {type: Failed, status: 'True'}], certificate: " +
		base64.StdEncoding.EncodeToString([]byte(pems.leaf)) + "}}"
	changes(t, done,
		changed[*csr]{sub: "approval", change: condition("Failed"), want: at + `: Forbidden: updates may not remove a condition of type "Approved"`},
		changed[*csr]{sub: "status", change: condition("Approved"), want: at + `: Forbidden: updates may not remove a condition of type "Failed"`},
		changed[*csr]{sub: "status", change: issue(pems.authority), want: "status.certificate: Forbidden: updates may not modify existing certificate content"},
		changed[*csr]{sub: "status", change: issue(""), want: "status.certificate: Forbidden: updates may not modify existing certificate content"},
	)
	// Who signs does not change what was approved, and who approves not the certificate.
	old := load[*csr](t, done)
	now := old.DeepCopy()
	now.Status.Conditions[0].Reason, now.Status.Conditions[1].Reason, now.Status.Certificate = "r", "s", []byte(pems.another)
	facets := All().ByType(old).Subresources
	signed, approved := now.DeepCopy(), now.DeepCopy()
	facets["status"].PrepareUpdate(signed, old)
	facets["approval"].PrepareUpdate(approved, old)
	if s := signed.Status; s.Conditions[0].Reason != "" || s.Conditions[1].Reason != "s" || string(s.Certificate) != pems.another {
		t.Errorf("signed: %+v", s)
	}
	if s := approved.Status; s.Conditions[0].Reason != "r" || string(s.Certificate) != pems.leaf {
		t.Errorf("approved: %+v", s)
	}
	const head = "NAME|AGE|SIGNERNAME|REQUESTOR|REQUESTEDDURATION|CONDITION\n"
	for text, want := range map[string]string{text: "a|3h|x.io/y|eve|<none>|Pending", done: "a|3h|x.io/y|eve|<none>|Approved,Failed,Issued",
		"{metadata: {name: a}, spec: {expirationSeconds: 86400}, status: {conditions: [{type: Denied}, {type: Approved}]}}": "a|3h|<none>||24h|Denied"} {
		if got := table[*csr](t, text); got != head+want {
			t.Error(got)
		}
	}
}

func TestClusterTrustBundle(t *testing.T) {
	pems := makePEM(t)
	bundle := func(name, signer, trust string) string {
		return "{metadata: {name: '" + name + "'}, spec: {signerName: '" + signer + "', trustBundle: " + `"` + strings.ReplaceAll(trust, "\n", `\n`) + `"` + "}}"
	}
	const trust = `spec.trustBundle: Invalid value: "<value omitted>": `
	refuses[*certificatesv1.ClusterTrustBundle](t,
		bad{bundle("a", "", "words\n"+pems.authority+pems.another), ""},
		bad{bundle("x.io:y:a", "x.io/y", pems.authority), ""},
		bad{bundle("a:b", "", pems.authority), invalidText("metadata.name", "a:b", `ClusterTrustBundle without signer name must not have ":" in its name`)},
		bad{bundle("a", "x.io/y", pems.authority), invalidText("metadata.name", "a", "ClusterTrustBundle for signerName x.io/y must be named with prefix x.io:y:")},
		bad{bundle("x.io:y:A", "x.io/y", pems.authority), invalidText("metadata.name", "x.io:y:A", notSubdomain)},
		bad{bundle("x:a", "x", pems.authority), invalidText("spec.signerName", "x", "must be a fully qualified domain and path of the form 'example.com/signer-name'")},
		bad{bundle("a", "", ""), trust + "at least one trust anchor must be provided"},
		bad{bundle("a", "", pems.authority+pems.request), trust + "entry 1 has bad block type: CERTIFICATE REQUEST"},
		bad{bundle("a", "", pems.leaf), trust + "entry 0 does not have the CA bit set"},
		bad{bundle("a", "", strings.Replace(pems.authority, "-----\n", "-----\na: b\n\n", 1)), trust + "entry 0 has PEM block headers"},
		bad{bundle("a", "", "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n"), trust + "entry 0 does not parse as X.509"},
		bad{bundle("a", "", pems.authority+pems.another+pems.authority), trust + "duplicate trust anchor (indices [0 2])"},
		bad{bundle("a", "", strings.Repeat("a", certificates.MaxTrustBundle+1)), "spec.trustBundle: Too long: may not be more than 1048576 bytes"},
	)
	changes(t, bundle("x.io:y:a", "x.io/y", pems.authority),
		changed[*certificatesv1.ClusterTrustBundle]{change: func(b *certificatesv1.ClusterTrustBundle) { b.Spec.TrustBundle = pems.leaf }, want: trust + "entry 0 does not have the CA bit set"},
		changed[*certificatesv1.ClusterTrustBundle]{change: func(b *certificatesv1.ClusterTrustBundle) { b.Spec.SignerName = "x.io/z" },
			want: invalidText("metadata.name", "x.io:y:a", "ClusterTrustBundle for signerName x.io/z must be named with prefix x.io:z:") + "\n" + invalidText("spec.signerName", "x.io/z", "field is immutable")},
	)
	// What is stored is not read again: what Go makes of a certificate may change.
	changes(t, bundle("a", "", pems.leaf),
		changed[*certificatesv1.ClusterTrustBundle]{change: func(b *certificatesv1.ClusterTrustBundle) { b.Labels = map[string]string{"a": "b"} }})
	if got := table[*certificatesv1.ClusterTrustBundle](t, bundle("x.io:y:a", "x.io/y", "")); got != "NAME|SIGNERNAME\nx.io:y:a|x.io/y" {
		t.Error(got)
	}
}
