package certificates_test

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

	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/api/kinds/certificates"
	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

// made has a certificate request and certificates, in PEM.
type made struct{ request, forged, authority, another, leaf string }

func makePEM(t *testing.T) made {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificateRequest(rand.Reader,
		&x509.CertificateRequest{Subject: pkix.Name{CommonName: "a"}}, key)
	if err != nil {
		t.Fatal(err)
	}
	block := func(kind string, der []byte) string {
		return string(pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}))
	}
	cert := func(serial int64, authority bool) string {
		c := &x509.Certificate{SerialNumber: big.NewInt(serial), NotAfter: kindstest.Now, BasicConstraintsValid: true,
			IsCA: authority}
		der, err := x509.CreateCertificate(rand.Reader, c, c, key.Public(), key)
		if err != nil {
			t.Fatal(err)
		}
		return block("CERTIFICATE", der)
	}
	forged := append([]byte(nil), der...)
	forged[len(forged)-1] ^= 1 // within the signature
	return made{block("CERTIFICATE REQUEST", der), block("CERTIFICATE REQUEST", forged), cert(1, true), cert(2, true),
		cert(3, false)}
}

func csrText(request, rest string) string {
	return "{metadata: {name: a}, spec: {request: " + base64.StdEncoding.EncodeToString([]byte(request)) +
		", " + rest + "}}"
}

func TestCertificateSigningRequest(t *testing.T) {
	pems := makePEM(t)
	const right = "signerName: x.io/y, usages: [client auth]"
	signer := func(name string) string {
		return csrText(pems.request, "usages: [client auth], signerName: '"+name+"'")
	}
	wrong := func(value, why string) string { return kindstest.InvalidText("spec.signerName", value, why) }
	const request = `spec.request: Invalid value: "<value omitted>": `
	long := strings.Repeat("a.", 127) + "io"
	kindstest.CheckRefused[*certificatesv1.CertificateSigningRequest](t,
		kindstest.BadObject{Text: csrText(pems.request, right+", expirationSeconds: 600"), Want: ""},
		kindstest.BadObject{Text: strings.Replace(csrText(pems.request, right), "name: a", "name: 'Any:Name_'", 1),
			Want: ""},
		kindstest.BadObject{Text: csrText("", right), Want: request + "PEM block type must be CERTIFICATE REQUEST"},
		kindstest.BadObject{Text: csrText("nonsense", right),
			Want: request + "PEM block type must be CERTIFICATE REQUEST"},
		kindstest.BadObject{Text: csrText(pems.leaf, right),
			Want: request + "PEM block type must be CERTIFICATE REQUEST"},
		kindstest.BadObject{Text: csrText("-----BEGIN CERTIFICATE REQUEST-----\nMAA=\n-----END CERTIFICATE "+
			"REQUEST-----\n", right), Want: request + "asn1: syntax error: sequence truncated"},
		kindstest.BadObject{Text: csrText(pems.request, "signerName: x.io/y"), Want: "spec.usages: Required value"},
		kindstest.BadObject{Text: csrText(pems.request, "signerName: x.io/y, usages: [client auth, client auth]"),
			Want: `spec.usages[1]: Duplicate value: "client auth"`},
		kindstest.BadObject{Text: csrText(pems.request, right+", expirationSeconds: 599"),
			Want: "spec.expirationSeconds: Invalid value: 599: may not specify a duration less than 600 " +
				"seconds (10 minutes)"},
		kindstest.BadObject{Text: csrText(pems.request, "usages: [any]"), Want: "spec.signerName: Required value"},
		kindstest.BadObject{Text: signer("kubernetes.io/legacy-unknown"),
			Want: wrong("kubernetes.io/legacy-unknown", "the legacy signerName is not allowed via this API version")},
		kindstest.BadObject{Text: signer("x.io"),
			Want: wrong("x.io", "must be a fully qualified domain and path of the form 'example.com/signer-name'")},
		kindstest.BadObject{Text: signer("x.io/a/b"),
			Want: wrong("x.io/a/b", "must be a fully qualified domain and path of the form 'example.com/signer-name'")},
		kindstest.BadObject{Text: signer("io/a"),
			Want: wrong("io", "should be a domain with at least two segments separated by dots")},
		kindstest.BadObject{Text: signer("X.io/a"), Want: wrong("X.io", `validating label "X": `+kindstest.NotLabel)},
		kindstest.BadObject{Text: signer("x..io/a"), Want: wrong("x..io", `validating label "": `+kindstest.NotLabel)},
		kindstest.BadObject{Text: signer("/a"), Want: wrong("", `validating label "": `+kindstest.NotLabel) + "\n" +
			wrong("", "should be a domain with at least two segments separated by dots")},
		kindstest.BadObject{Text: signer("x.io/"), Want: wrong("", `validating label "": `+kindstest.NotSubdomain)},
		kindstest.BadObject{Text: signer("x.io/A"), Want: wrong("A", `validating label "A": `+kindstest.NotSubdomain)},
		kindstest.BadObject{Text: signer("x.io/a.B"),
			Want: wrong("a.B", `validating label "B": `+kindstest.NotSubdomain)},
		kindstest.BadObject{Text: signer(long + "/a"),
			Want: "spec.signerName: Too long: may not be more than 253 bytes"},
		kindstest.BadObject{Text: signer("x.io/" + strings.Repeat("aaaa.", 200) + "a"),
			Want: "spec.signerName: Too long: may not be more than 571 bytes"},
		kindstest.BadObject{Text: "{metadata: {name: a/b}, spec: {}}",
			Want: kindstest.InvalidText("metadata.name", "a/b", "may not contain '/'") + "\n" + request +
				"PEM block type must be CERTIFICATE REQUEST\nspec.usages: Required " +
				"value\nspec.signerName: Required value"},
	)
	// A request that is not signed with its own key, and an unknown usage.
	forged := kindstest.Load[*certificatesv1.CertificateSigningRequest](t,
		csrText(pems.forged, "signerName: x.io/y, usages: [fun]"))
	got := kindstest.JoinErrors(kinds.All().ByType(forged).ValidateObject(forged, nil))
	if !strings.HasPrefix(got, request+"x509: ECDSA verification failure") ||
		!strings.Contains(got, `spec.usages[0]: Unsupported value: "fun": supported values: "any", "cert sign"`) {
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
				c.Status.Conditions = append(c.Status.Conditions,
					certificatesv1.CertificateSigningRequestCondition{Type: k, Status: corev1.ConditionTrue})
			}
		}
	}
	issue := func(cert string) func(*csr) { return func(c *csr) { c.Status.Certificate = []byte(cert) } }
	const at = "status.conditions"
	kindstest.CheckChanges(t, text,
		// Of the object itself only the metadata changes.
		kindstest.Change[*csr]{Change: func(c *csr) {
			c.Spec.Username, c.Spec.SignerName = "admin", "z"
			condition("Approved")(c)
			issue(pems.leaf)(c)
		}},
		kindstest.Change[*csr]{Sub: "approval", Change: condition("Approved")},
		kindstest.Change[*csr]{Sub: "approval", Change: condition("Denied")},
		kindstest.Change[*csr]{Sub: "approval", Change: func(c *csr) {
			condition("Denied")(c)
			issue("x")(c)
			c.Spec.Username = "admin"
		}},
		kindstest.Change[*csr]{Sub: "approval", Change: condition("Approved", "Denied"),
			Want: at + `: Invalid value: "{Approved, Denied}": Approved and Denied conditions are mutually exclusive`},
		kindstest.Change[*csr]{Sub: "approval", Change: condition("Approved", "Approved"),
			Want: at + `[1].type: Duplicate value: "Approved"`},
		kindstest.Change[*csr]{Sub: "approval", Change: condition(""), Want: at + "[0].type: Required value"},
		kindstest.Change[*csr]{Sub: "approval", Change: func(c *csr) {
			condition("Approved")(c)
			c.Status.Conditions[0].Status = "False"
		},
			Want: at + `[0].status: Unsupported value: "False": supported values: "True"`},
		kindstest.Change[*csr]{Sub: "approval", Change: func(c *csr) {
			condition("Other")(c)
			c.Status.Conditions[0].Status = ""
		}, Want: at + "[0].status: Required value"},
		kindstest.Change[*csr]{Sub: "status", Change: condition("Failed")},
		kindstest.Change[*csr]{Sub: "status", Change: issue(pems.leaf + pems.authority)},
		kindstest.Change[*csr]{Sub: "status", Change: condition("Approved"),
			Want: at + `: Forbidden: updates may not add a condition of type "Approved"`},
		kindstest.Change[*csr]{Sub: "status", Change: condition("Denied"),
			Want: at + `: Forbidden: updates may not add a condition of type "Denied"`},
		kindstest.Change[*csr]{Sub: "status", Change: issue(pems.request),
			Want: `status.certificate: Invalid value: "<certificate data>": only CERTIFICATE PEM blocks are allowed, ` +
				`found "CERTIFICATE REQUEST"`},
		kindstest.Change[*csr]{Sub: "status", Change: issue("x"),
			Want: `status.certificate: Invalid value: "<certificate data>": must contain at least one ` +
				`CERTIFICATE PEM block`},
		kindstest.Change[*csr]{Sub: "status", Change: issue(strings.Replace(pems.leaf, "-----\n", "-----\na: b\n\n",
			1)), Want: `status.certificate: Invalid value: "<certificate data>": no PEM block headers are permitted`},
	)
	done := strings.TrimSuffix(text, "}") + ", status: {conditions: [{type: Approved, status: 'True'}, " +
		"{type: Failed, status: 'True'}], certificate: " +
		base64.StdEncoding.EncodeToString([]byte(pems.leaf)) + "}}"
	kindstest.CheckChanges(t, done,
		kindstest.Change[*csr]{Sub: "approval", Change: condition("Failed"),
			Want: at + `: Forbidden: updates may not remove a condition of type "Approved"`},
		kindstest.Change[*csr]{Sub: "status", Change: condition("Approved"),
			Want: at + `: Forbidden: updates may not remove a condition of type "Failed"`},
		kindstest.Change[*csr]{Sub: "status", Change: issue(pems.authority),
			Want: "status.certificate: Forbidden: updates may not modify existing certificate content"},
		kindstest.Change[*csr]{Sub: "status", Change: issue(""),
			Want: "status.certificate: Forbidden: updates may not modify existing certificate content"},
	)
	// A signer cannot change the decision, and an approver cannot change the certificate.
	old := kindstest.Load[*csr](t, done)
	now := old.DeepCopy()
	now.Status.Conditions[0].Reason, now.Status.Conditions[1].Reason, now.Status.Certificate = "r", "s",
		[]byte(pems.another)
	facets := kinds.All().ByType(old).Subresources
	signed, approved := now.DeepCopy(), now.DeepCopy()
	facets["status"].PrepareUpdate(signed, old)
	facets["approval"].PrepareUpdate(approved, old)
	if s := signed.Status; s.Conditions[0].Reason != "" || s.Conditions[1].Reason != "s" ||
		string(s.Certificate) != pems.another {
		t.Errorf("signed: %+v", s)
	}
	if s := approved.Status; s.Conditions[0].Reason != "r" || string(s.Certificate) != pems.leaf {
		t.Errorf("approved: %+v", s)
	}
	const head = "NAME|AGE|SIGNERNAME|REQUESTOR|REQUESTEDDURATION|CONDITION\n"
	for text, want := range map[string]string{text: "a|3h|x.io/y|eve|<none>|Pending",
		done: "a|3h|x.io/y|eve|<none>|Approved,Failed,Issued",
		"{metadata: {name: a}, spec: {expirationSeconds: 86400}, status: {conditions: [{type: Denied}, {type: " +
			"Approved}]}}": "a|3h|<none>||24h|Denied"} {
		if got := kindstest.PrintTable[*csr](t, text); got != head+want {
			t.Error(got)
		}
	}
}

func TestClusterTrustBundle(t *testing.T) {
	pems := makePEM(t)
	bundle := func(name, signer, trust string) string {
		return "{metadata: {name: '" + name + "'}, spec: {signerName: '" + signer + "', trustBundle: " + `"` +
			strings.ReplaceAll(trust, "\n", `\n`) + `"` + "}}"
	}
	const trust = `spec.trustBundle: Invalid value: "<value omitted>": `
	kindstest.CheckRefused[*certificatesv1.ClusterTrustBundle](t,
		kindstest.BadObject{Text: bundle("a", "", "words\n"+pems.authority+pems.another), Want: ""},
		kindstest.BadObject{Text: bundle("x.io:y:a", "x.io/y", pems.authority), Want: ""},
		kindstest.BadObject{Text: bundle("a:b", "", pems.authority),
			Want: kindstest.InvalidText("metadata.name", "a:b",
				`ClusterTrustBundle without signer name must not have ":" in its name`)},
		kindstest.BadObject{Text: bundle("a", "x.io/y", pems.authority),
			Want: kindstest.InvalidText("metadata.name", "a",
				"ClusterTrustBundle for signerName x.io/y must be named with prefix x.io:y:")},
		kindstest.BadObject{Text: bundle("x.io:y:A", "x.io/y", pems.authority),
			Want: kindstest.InvalidText("metadata.name", "x.io:y:A", kindstest.NotSubdomain)},
		kindstest.BadObject{Text: bundle("x:a", "x", pems.authority),
			Want: kindstest.InvalidText("spec.signerName", "x",
				"must be a fully qualified domain and path of the form 'example.com/signer-name'")},
		kindstest.BadObject{Text: bundle("a", "", ""), Want: trust + "at least one trust anchor must be provided"},
		kindstest.BadObject{Text: bundle("a", "", pems.authority+pems.request),
			Want: trust + "entry 1 has bad block type: CERTIFICATE REQUEST"},
		kindstest.BadObject{Text: bundle("a", "", pems.leaf), Want: trust + "entry 0 does not have the CA bit set"},
		kindstest.BadObject{Text: bundle("a", "", strings.Replace(pems.authority, "-----\n", "-----\na: b\n\n", 1)),
			Want: trust + "entry 0 has PEM block headers"},
		kindstest.BadObject{Text: bundle("a", "", "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n"),
			Want: trust + "entry 0 does not parse as X.509"},
		kindstest.BadObject{Text: bundle("a", "", pems.authority+pems.another+pems.authority),
			Want: trust + "duplicate trust anchor (indices [0 2])"},
		kindstest.BadObject{Text: bundle("a", "", strings.Repeat("a", certificates.MaxTrustBundle+1)),
			Want: "spec.trustBundle: Too long: may not be more than 1048576 bytes"},
	)
	kindstest.CheckChanges(t, bundle("x.io:y:a", "x.io/y", pems.authority),
		kindstest.Change[*certificatesv1.ClusterTrustBundle]{Change: func(b *certificatesv1.ClusterTrustBundle) {
			b.Spec.TrustBundle = pems.leaf
		}, Want: trust + "entry 0 does not have the CA bit set"},
		kindstest.Change[*certificatesv1.ClusterTrustBundle]{Change: func(b *certificatesv1.ClusterTrustBundle) {
			b.Spec.SignerName = "x.io/z"
		},
			Want: kindstest.InvalidText("metadata.name", "x.io:y:a",
				"ClusterTrustBundle for signerName x.io/z must be named with prefix x.io:z:") + "\n" +
				kindstest.InvalidText("spec.signerName", "x.io/z", "field is immutable")},
	)
	// What is stored is not read again: what Go makes of a certificate may change.
	kindstest.CheckChanges(t, bundle("a", "", pems.leaf),
		kindstest.Change[*certificatesv1.ClusterTrustBundle]{Change: func(b *certificatesv1.ClusterTrustBundle) {
			b.Labels = map[string]string{"a": "b"}
		}})
	if got := kindstest.PrintTable[*certificatesv1.ClusterTrustBundle](t, bundle("x.io:y:a", "x.io/y", "")); got !=
		"NAME|SIGNERNAME\nx.io:y:a|x.io/y" {
		t.Error(got)
	}
}
