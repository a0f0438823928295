package forward

import (
	"bytes"
	"compress/flate"
	"compress/gzip"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/iotest"
)

var testLinks = Links{Prefix: "/api/v1/namespaces/n/services/web/proxy",
	Hosts: []string{"web.n.svc:80", "localhost:8001"}}

// F16: redirects and links lead through the proxy; other hosts and relative URLs stay.
func TestLinksAreRewritten(t *testing.T) {
	p := testLinks.Prefix
	for link, want := range map[string]string{
		"/":                               p + "/",
		"/a/b":                            p + "/a/b",
		"/a/b/?x=1#f":                     p + "/a/b/?x=1#f",
		"/a%2Fb":                          p + "/a%2Fb",
		"http://web.n.svc:80/a":           p + "/a",
		"https://localhost:8001/a":        p + "/a",
		"//web.n.svc:80/a":                p + "/a",
		p + "/a":                          p + "/a",
		"http://localhost:8001" + p + "/": p + "/",
		"a/b":                             "a/b",
		"../a":                            "../a",
		"?x=1":                            "?x=1",
		"#f":                              "#f",
		"":                                "",
		"https://example.com/a":           "https://example.com/a",
		"mailto:a@example.com":            "mailto:a@example.com",
		"javascript:void(0)":              "javascript:void(0)",
		"%zz":                             "%zz",
	} {
		if got := testLinks.Rewrite(link); got != want {
			t.Errorf("%q: %q, want %q", link, got, want)
		}
	}
}

// response returns a response of a proxied server.
func response(media, encoding string, body io.Reader) *http.Response {
	h := http.Header{"Content-Type": {media}, "Content-Length": {"7"}}
	if encoding != "" {
		h.Set("Content-Encoding", encoding)
	}
	return &http.Response{StatusCode: http.StatusOK, Header: h, Body: io.NopCloser(body), ContentLength: 7,
		Request: &http.Request{Method: http.MethodGet}}
}

const page = `<!DOCTYPE html><html><head><title>a &amp; b</title><link rel="x" href="/s.css"></head>
<body><a href="/rewriteme">test</a><A HREF='/q?a=1&amp;b=2' id=x>t</A><a href="rel">r</a><img src="/i.png"/>
<script src="/x.js">if (a < b && "<a href='/no'>") {}</script><p title="/no">/no</p><!-- <a href="/no"> --></body></html>`

// F16: only attributes that hold URLs change, whatever the size of the reads and the encoding.
func TestHTMLIsRewritten(t *testing.T) {
	p := testLinks.Prefix
	want := strings.NewReplacer(`href="/s.css"`, `href="`+p+`/s.css"`, `href="/rewriteme"`, `href="`+p+`/rewriteme"`,
		`<A HREF='/q?a=1&amp;b=2' id=x>`, `<a href="`+p+`/q?a=1&amp;b=2" id="x">`, `src="/i.png"`, `src="`+p+`/i.png"`,
		`src="/x.js"`, `src="`+p+`/x.js"`).Replace(page)
	var zipped, deflated bytes.Buffer
	zip := gzip.NewWriter(&zipped)
	_, _ = zip.Write([]byte(page))
	_ = zip.Close()
	fl, _ := flate.NewWriter(&deflated, 1)
	_, _ = fl.Write([]byte(page))
	_ = fl.Close()
	for encoding, body := range map[string]string{"": page, "gzip": zipped.String(), "deflate": deflated.String()} {
		resp := response("text/html; charset=utf-8", encoding, iotest.OneByteReader(strings.NewReader(body)))
		if err := testLinks.Apply(resp); err != nil {
			t.Fatalf("%q: %v", encoding, err)
		}
		var out io.Reader = resp.Body
		switch encoding {
		case "gzip":
			out, _ = gzip.NewReader(resp.Body)
		case "deflate":
			out = flate.NewReader(resp.Body)
		}
		got, err := io.ReadAll(out)
		if err != nil || string(got) != want {
			t.Errorf("%q: %v\n got %s\nwant %s", encoding, err, got, want)
		}
		if resp.ContentLength != -1 || resp.Header.Get("Content-Length") != "" {
			t.Errorf("%q: a length of %d, %q", encoding, resp.ContentLength, resp.Header.Get("Content-Length"))
		}
	}
	for name, resp := range map[string]*http.Response{
		"other media":      response("text/plain", "", strings.NewReader(page)),
		"unknown encoding": response("text/html", "br", strings.NewReader(page)),
	} {
		if err := testLinks.Apply(resp); err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(resp.Body); err != nil || string(got) != page || resp.ContentLength != 7 {
			t.Errorf("%s: %v %s", name, err, got)
		}
	}
}

// A document of endless text passes with bounded memory, and loses nothing. A source that breaks is
// an error.
func TestHostileHTMLIsBounded(t *testing.T) {
	const size = 64 << 20
	resp := response("text/html", "", io.MultiReader(strings.NewReader(`<a href="/x">`+"<"),
		io.LimitReader(letters{}, size), strings.NewReader(`<a href="/y">`)))
	if err := testLinks.Apply(resp); err != nil {
		t.Fatal(err)
	}
	body := resp.Body.(*htmlBody)
	total, most := 0, 0
	for buf := make([]byte, 4<<10); ; {
		n, err := resp.Body.Read(buf)
		total, most = total+n, max(most, body.ready.Cap())
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if want := size + len(`<a href="`+testLinks.Prefix+`/x"><<a href="/y">`); total != want {
		t.Errorf("%d bytes, want %d", total, want)
	}
	if most > 4*maxHTMLToken {
		t.Errorf("%d bytes were kept", most)
	}
	broken := response("text/html", "", io.MultiReader(strings.NewReader("<p>"), iotest.ErrReader(errors.New("cut"))))
	if err := testLinks.Apply(broken); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadAll(broken.Body); err == nil || err.Error() != "cut" {
		t.Errorf("a broken source: %v", err)
	}
}

// letters never ends.
type letters struct{}

func (letters) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = 'a'
	}
	return len(p), nil
}
