package command

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// check reports errors in each configured file, with the flag, the file, and the line or field. It
// needs no replica and no network. A missing file is an error too, because run would not start.
func TestConfiguredFiles(t *testing.T) {
	const kubeconfig = "apiVersion: v1\nkind: Config\nclusters: [{name: c, cluster: {server: " +
		"'https://hook.invalid'%}}]\n" +
		"users: [{name: u, user: {}}]\ncontexts: [{name: x, context: {cluster: c, user: u}}]\ncurrent-context: x\n"
	hook := func(more string) string { return strings.Replace(kubeconfig, "%", more, 1) }
	const authentication = "apiVersion: apiserver.config.k8s.io/v1\nkind: AuthenticationConfiguration\n"
	const authorization = "apiVersion: apiserver.config.k8s.io/v1\nkind: AuthorizationConfiguration\nauthorizers:\n"
	issuer := func(more string) string {
		return authentication + "jwt:\n- issuer: {url: 'https://issuer.invalid', audiences: [a]" + more +
			"}\n  claimMappings: {username: {claim: sub, prefix: ''}}\n"
	}
	const oidc = " --oidc-issuer-url=https://issuer.invalid --oidc-client-id=a"
	for _, c := range []struct {
		flags, file string // FILE in flags is the path of the file; "" = no file
		want        string // "" = valid; may contain FILE
	}{
		{"--authentication-config=FILE", issuer(""), ""},
		{"--authentication-config=FILE", authentication + "jwtt: []\n",
			`--authentication-config: FILE: strict decoding error: unknown field "jwtt"`},
		{"--authentication-config=FILE", issuer(", certificateAuthority: x"),
			"--authentication-config: FILE: jwt[0].issuer.certificateAuthority"},
		{"--authentication-config=FILE", strings.Replace(issuer(""), "https://issuer.invalid",
			"https://kubernetes.default.svc.cluster.local", 1),
			"--authentication-config: FILE: jwt[0].issuer.url: Invalid value"},
		{"--authentication-config=FILE", "", "--authentication-config: open FILE: no such file"},
		{"--oidc-ca-file=FILE" + oidc, "x", "--oidc-ca-file: FILE contains no certificate"},
		{"--oidc-ca-file=FILE" + oidc, "", "--oidc-ca-file: open FILE: no such file"},
		{"--token-auth-file=FILE", "t,u,1\n", ""},
		{"--token-auth-file=FILE", "t,u,1\nt\n", "--token-auth-file: static tokens FILE: line 2 has 1 columns"},
		{"--token-auth-file=FILE", "", "--token-auth-file: reading the static tokens: open FILE: no such file"},
		{"--authentication-token-webhook-config-file=FILE", hook(""), ""},
		{"--authentication-token-webhook-config-file=FILE", "clusters: x",
			"--authentication-token-webhook-config-file: kubeconfig FILE: "},
		{"--authentication-token-webhook-config-file=FILE", hook(", certificate-authority: /does/not/exist"),
			"unable to read certificate-authority /does/not/exist"},
		{"--authentication-token-webhook-config-file=FILE --authentication-token-webhook-version=v3", hook(""),
			"--authentication-token-webhook-version: "},
		{"--requestheader-client-ca-file=FILE --requestheader-username-headers=X-Remote-User", "x",
			"--requestheader-client-ca-file: FILE contains no certificate"},
		{"--authorization-config=FILE", authorization + "- {type: RBAC, name: rbac}\n", ""},
		{"--authorization-config=FILE", authorization + "- {type: RBAC, name: rbac}\n- {type: Rbac, name: x}\n",
			"--authorization-config: FILE: authorizers[1].type: "},
		{"--authorization-config=FILE", authorization + "- {type: ABAC, name: a}\n",
			"--authorization-config: FILE: authorizers[0]: type ABAC requires the flag --authorization-policy-file"},
		{"--authorization-policy-file=FILE --authorization-mode=ABAC", "{}\n{",
			"--authorization-mode ABAC: FILE: line 2: "},
		{"--authorization-policy-file=FILE --authorization-mode=ABAC", "", "FILE: no such file"},
		{"--authorization-webhook-config-file=FILE --authorization-mode=Webhook",
			hook(", certificate-authority-data: eA=="), "--authorization-mode Webhook: kubeconfig FILE: "},
		{"--admission-control-config-file=FILE", "kind: Other", "admission configuration FILE: it is a \"Other\""},
		{"--scheduler-config=FILE", "kind: Other", "FILE"},
		{"--audit-policy-file=FILE", "apiVersion: audit.k8s.io/v1\nkind: Policy\nrules: [{level: Much}]\n",
			"audit policy FILE: rules[0].level"},
		{"--encryption-keys=FILE", "k " + strings.Repeat("A", 43) + "=\n", ""},
		{"--encryption-keys=FILE", "k short\n", "--encryption-keys: FILE: line 1: "},
		{"--encryption-keys=FILE", "", "--encryption-keys: key file: stat FILE: no such file"},
		{"--encryption-keys=none", "", ""},
		{"--backup-schedule=@daily --backup-folder=/backups --backup-recipients-file=FILE", "age1x\n",
			"--backup-recipients-file: want recipients of age"},
	} {
		t.Run(c.flags+" "+c.want, func(t *testing.T) {
			dir := t.TempDir()
			file, data := filepath.Join(dir, "file"), filepath.Join(dir, "data")
			if c.file != "" {
				if err := os.WriteFile(file, []byte(c.file), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			args := append([]string{"check", "--config=", "--name=cp1", "--advertise-address=192.0.2.11",
				"--data-dir=" + data},
				strings.Fields(strings.ReplaceAll(c.flags, "FILE", file))...)
			_, err := runCommandLine(args...)
			switch want := strings.ReplaceAll(c.want, "FILE", file); {
			case want == "" && err != nil:
				t.Errorf("valid settings were refused: %v", err)
			case want != "" && (err == nil || !strings.Contains(err.Error(), want)):
				t.Errorf("%v, want %s", err, want)
			}
			if _, err := os.Stat(data); err == nil {
				t.Error("the data directory was created")
			}
		})
	}
}
