// Package config builds the authentication methods from files and flags, which have the same names
// as those of kube-apiserver. It reloads changed files while the replica runs. A changed file that
// cannot be read or is invalid is ignored.
package config

import (
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apiserver/pkg/apis/apiserver"
	"k8s.io/apiserver/pkg/apis/apiserver/install"
	"k8s.io/apiserver/pkg/apis/apiserver/validation"
	authenticationcel "k8s.io/apiserver/pkg/authentication/cel"

	"keelson.dev/keelson/controlplane/apiserver/authn/issuer"
	"keelson.dev/keelson/internal/filewatch"
)

// Options are the authentication flags of the API server. The zero value adds no methods to the
// built-in ones and allows system:anonymous.
type Options struct {
	ConfigFile string // --authentication-config
	Anonymous  *bool  // --anonymous-auth; nil = not set
	OIDC       OIDC

	TokenFile       string        // --token-auth-file
	WebhookConfig   string        // --authentication-token-webhook-config-file
	WebhookVersion  string        // --authentication-token-webhook-version
	WebhookTTL      time.Duration // --authentication-token-webhook-cache-ttl
	BootstrapTokens bool          // --enable-bootstrap-token-auth
	RequestHeader   RequestHeader
}

// Defaults returns the default values of the flags.
func Defaults() Options {
	return Options{
		WebhookVersion: "v1beta1", WebhookTTL: 2 * time.Minute,
		OIDC: OIDC{UsernameClaim: "sub", SigningAlgs: []string{"RS256"}},
	}
}

// OIDC configures one OpenID Connect issuer by flags.
type OIDC struct {
	IssuerURL, ClientID, CAFile   string
	UsernameClaim, UsernamePrefix string
	GroupsClaim, GroupsPrefix     string
	SigningAlgs                   []string
	RequiredClaims                map[string]string
}

// RequestHeader configures the authenticating proxies that may pass the identity of a user in
// headers.
type RequestHeader struct {
	ClientCAFile                                             string
	AllowedNames                                             []string
	UsernameHeaders, UIDHeaders, GroupHeaders, ExtraPrefixes []string
}

// Check returns an error that names an invalid flag, or a flag that requires another flag that is
// not set.
func (o *Options) Check() error {
	if o.ConfigFile != "" && o.OIDC.isSet() {
		return errors.New("--authentication-config and --oidc-* flags cannot be combined: " +
			"configure the issuer in the file")
	}
	if o.OIDC.isSet() && (o.OIDC.IssuerURL == "" || o.OIDC.ClientID == "") {
		return errors.New("--oidc-issuer-url and --oidc-client-id must be set together, and the other --oidc-* " +
			"flags require both")
	}
	if h := &o.RequestHeader; h.ClientCAFile == "" {
		if len(h.AllowedNames)+len(h.UsernameHeaders)+len(h.UIDHeaders)+len(h.GroupHeaders)+len(h.ExtraPrefixes) > 0 {
			return errors.New("--requestheader-* flags require --requestheader-client-ca-file, which " +
				"authenticates the proxy")
		}
	} else if len(h.UsernameHeaders) == 0 {
		return errors.New("--requestheader-client-ca-file requires --requestheader-username-headers, such " +
			"as X-Remote-User")
	}
	if o.WebhookTTL < 0 {
		return fmt.Errorf("--authentication-token-webhook-cache-ttl %v: want 0 or more", o.WebhookTTL)
	}
	return nil
}

func (o *OIDC) isSet() bool {
	return o.IssuerURL+o.ClientID+o.CAFile+o.UsernamePrefix+o.GroupsClaim+o.GroupsPrefix != "" ||
		len(o.RequiredClaims) > 0
}

// jwtAuthenticator converts the --oidc-* flags to an entry of the AuthenticationConfiguration file.
func (o *OIDC) jwtAuthenticator() (apiserver.JWTAuthenticator, error) {
	a := apiserver.JWTAuthenticator{Issuer: apiserver.Issuer{URL: o.IssuerURL, Audiences: []string{o.ClientID}}}
	if o.CAFile != "" {
		ca, err := filewatch.Read(o.CAFile, maxFile)
		if err != nil {
			return a, fmt.Errorf("--oidc-ca-file: %w", err)
		}
		if !x509.NewCertPool().AppendCertsFromPEM(ca) {
			return a, fmt.Errorf("--oidc-ca-file: %s contains no certificate", o.CAFile)
		}
		a.Issuer.CertificateAuthority = string(ca)
	}
	prefix := o.UsernamePrefix
	switch {
	case prefix == "-":
		prefix = ""
	case prefix == "" && o.UsernameClaim != "email":
		prefix = o.IssuerURL + "#"
	}
	a.ClaimMappings.Username = apiserver.PrefixedClaimOrExpression{Claim: o.UsernameClaim, Prefix: &prefix}
	if o.GroupsClaim != "" {
		a.ClaimMappings.Groups = apiserver.PrefixedClaimOrExpression{Claim: o.GroupsClaim, Prefix: &o.GroupsPrefix}
	}
	for _, claim := range slices.Sorted(maps.Keys(o.RequiredClaims)) {
		a.ClaimValidationRules = append(a.ClaimValidationRules,
			apiserver.ClaimValidationRule{Claim: claim, RequiredValue: o.RequiredClaims[claim]})
	}
	return a, nil
}

// maxFile is the maximum size of a configuration file in bytes.
const maxFile = 4 << 20

// reader reads AuthenticationConfiguration files and creates the issuers that they configure.
type reader struct {
	compiler   authenticationcel.Compiler
	disallowed []string
	clock      func() time.Time
	log        *slog.Logger
}

// newDecoder returns a strict decoder: an unknown field is an error.
func newDecoder() runtime.Decoder {
	scheme := runtime.NewScheme()
	install.Install(scheme)
	return serializer.NewCodecFactory(scheme, serializer.EnableStrict).UniversalDecoder()
}

// readFile reads, decodes and validates an AuthenticationConfiguration file.
func (r *reader) readFile(path string) (*apiserver.AuthenticationConfiguration, error) {
	data, err := filewatch.Read(path, maxFile)
	if err != nil {
		return nil, err
	}
	if len(strings.TrimSpace(string(data))) == 0 {
		return nil, fmt.Errorf("%s is empty: want an AuthenticationConfiguration", path)
	}
	obj, err := runtime.Decode(newDecoder(), data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	c, ok := obj.(*apiserver.AuthenticationConfiguration)
	if !ok {
		return nil, fmt.Errorf("%s contains a %T: want an AuthenticationConfiguration", path, obj)
	}
	if err := validation.ValidateAuthenticationConfiguration(r.compiler, c, r.disallowed).ToAggregate(); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return c, nil
}

// newIssuers returns the issuers of a configuration. An issuer in previous is reused if its
// configuration is unchanged.
func (r *reader) newIssuers(
	c *apiserver.AuthenticationConfiguration, algorithms []string, previous []configuredIssuer,
) ([]configuredIssuer, error) {
	var out []configuredIssuer
	for n, j := range c.JWT {
		if at := slices.IndexFunc(previous, func(f configuredIssuer) bool { return f.sameAs(j) }); at >= 0 {
			out = append(out, previous[at])
			continue
		}
		i, err := issuer.New(issuer.Config{
			JWT: j, Compiler: r.compiler, Algorithms: algorithms, Disallowed: r.disallowed, Clock: r.clock, Log: r.log,
		})
		if err != nil {
			return nil, fmt.Errorf("jwt[%d]: %w", n, err)
		}
		out = append(out, configuredIssuer{config: j, Issuer: i})
	}
	return out, nil
}
